// Negotiation over links. Messages travel along a tree to the coordinator, rank 0, and its answer
// travels back. Every rank passes on the messages of the ranks below it, and merges equal messages.
// A message is a frame of fixed length, which suffices in the steady state. A second transfer
// carries the rest of a longer message.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "scheduler/negotiation.h"
#include "scheduler/negotiation_tree.h"

namespace sparkhvd {
namespace {

using Frame = std::vector<std::byte>;

constexpr int kCoordinator = 0;
constexpr size_t kFrameBytes = 256;
constexpr size_t kLengthBytes = sizeof(uint32_t);

// If a rank is missing, its parent in the tree fails with an error that names it. This error must
// come first. So a rank waits a little longer for a child that itself waits for others, and longest
// for the coordinator.
constexpr double kPatienceShare = 0.5;
constexpr double kPatienceSeconds = 2.0;

// Returns the length of the message and the message, padded to at least one frame.
std::vector<std::byte> Pack(const std::vector<std::byte>& message) {
  std::vector<std::byte> packed(std::max(kFrameBytes, kLengthBytes + message.size()));
  const auto length = static_cast<uint32_t>(message.size());
  std::memcpy(packed.data(), &length, kLengthBytes);
  if (!message.empty()) std::memcpy(packed.data() + kLengthBytes, message.data(), message.size());
  return packed;
}

Result<size_t> MessageBytes(const std::vector<std::byte>& frame) {
  uint32_t length = 0;
  std::memcpy(&length, frame.data(), kLengthBytes);
  if (length > kMaxMessageBytes) {
    return Status(StatusCode::kInternal, "a negotiation message of " + std::to_string(length) +
                                             " bytes exceeds the limit");
  }
  return static_cast<size_t>(length);
}

Status PostPacked(Transport& transport, int peer, const std::vector<std::byte>& packed,
                  std::vector<Ticket>& tickets) {
  const ConstBytes all(packed.data(), packed.size());
  const Result<Ticket> head = transport.PostSend(peer, all.Sub(0, kFrameBytes));
  SHVD_TRY(head.status());
  tickets.push_back(head.value());
  if (packed.size() > kFrameBytes) {
    const Result<Ticket> rest =
        transport.PostSend(peer, all.Sub(kFrameBytes, packed.size() - kFrameBytes));
    SHVD_TRY(rest.status());
    tickets.push_back(rest.value());
  }
  return Status();
}

Status PostFrame(Transport& transport, int peer, std::vector<std::byte>& frame,
                 std::vector<Ticket>& tickets) {
  frame.resize(kFrameBytes);
  const Result<Ticket> posted = transport.PostReceive(peer, Bytes(frame.data(), kFrameBytes));
  SHVD_TRY(posted.status());
  tickets.push_back(posted.value());
  return Status();
}

// Starts the transfer of the rest of a message whose frame has arrived.
Status PostRest(Transport& transport, int peer, std::vector<std::byte>& frame,
                std::vector<Ticket>& tickets) {
  const Result<size_t> length = MessageBytes(frame);
  SHVD_TRY(length.status().Annotate("from rank " + std::to_string(peer)));
  if (kLengthBytes + length.value() <= kFrameBytes) return Status();
  frame.resize(kLengthBytes + length.value());
  const Result<Ticket> posted =
      transport.PostReceive(peer, Bytes(frame.data() + kFrameBytes, frame.size() - kFrameBytes));
  SHVD_TRY(posted.status());
  tickets.push_back(posted.value());
  return Status();
}

Status WaitAll(Transport& transport, const std::vector<Ticket>& tickets, Deadline deadline) {
  if (tickets.empty()) return Status();
  return transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
}

// Returns the message in a complete frame.
ConstBytes Unpack(const std::vector<std::byte>& frame) {
  uint32_t length = 0;
  std::memcpy(&length, frame.data(), kLengthBytes);
  return ConstBytes(frame.data() + kLengthBytes, length);
}

bool Equal(ConstBytes one, ConstBytes other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

// Appends `next`, whose ranks follow those of `messages`, or merges it with an equal last message.
void Append(std::vector<RankedMessage>& messages, const RankedMessage& next) {
  if (!messages.empty() && Equal(messages.back().content, next.content)) {
    messages.back().count += next.count;
  } else {
    messages.push_back(next);
  }
}

class CoordinatedNegotiation final : public Negotiation {
 public:
  CoordinatedNegotiation(Transport& transport, size_t cache_capacity, double timeout_s, int fan_in)
      : Negotiation(transport.size(), cache_capacity),
        transport_(transport),
        timeout_s_(timeout_s),
        place_(PlaceInTree(transport.rank(), transport.size(), fan_in)),
        height_of_all_(PlaceInTree(kCoordinator, transport.size(), fan_in).height),
        frames_(place_.children.size()) {}

  Bytes Announce(const RequestMessage& message) override {
    own_ = message;
    return Bytes();
  }

  Status Enter() override {
    tickets_.clear();
    for (size_t i = 0; i < frames_.size(); ++i) {
      SHVD_TRY(PostFrame(transport_, place_.children[i].rank, frames_[i], tickets_));
    }
    return coordinates() || !frames_.empty() ? Status() : Report();
  }

  Result<Outcome> Conclude(Deadline deadline) override {
    if (!frames_.empty()) {
      SHVD_TRY(CollectFromBelow(deadline.Later((place_.height - 1) * Patience()))
                   .Annotate("waiting for the other ranks' requests"));
    }
    Result<ResponseMessage> response = coordinates() ? Coordinate() : Follow(deadline);
    SHVD_TRY(response.status());
    SHVD_TRY(PassOn(Longest(deadline)));
    return Outcome{std::move(response).value(), std::nullopt};
  }

  // Interrupting a wait over links breaks the links. A single rank has nothing to wait for.
  bool interruptible() const override { return transport_.size() == 1; }

 private:
  bool coordinates() const { return transport_.rank() == kCoordinator; }

  // Returns how much longer a rank waits than its children in the tree.
  std::chrono::duration<double> Patience() const {
    return std::chrono::duration<double>(std::min(timeout_s_ * kPatienceShare, kPatienceSeconds) /
                                         std::max(height_of_all_, 1));
  }

  // Returns the deadline for the answer of the coordinator.
  Deadline Longest(Deadline deadline) const { return deadline.Later(height_of_all_ * Patience()); }

  Status CollectFromBelow(Deadline deadline) {
    SHVD_TRY(WaitAll(transport_, tickets_, deadline));
    tickets_.clear();
    for (size_t i = 0; i < frames_.size(); ++i) {
      SHVD_TRY(PostRest(transport_, place_.children[i].rank, frames_[i], tickets_));
    }
    SHVD_TRY(WaitAll(transport_, tickets_, deadline));
    tickets_.clear();
    return Status();
  }

  // Appends the messages of the ranks below. Their contents are views of `frames_`.
  Status AddFromBelow(std::vector<RankedMessage>& messages) const {
    for (size_t i = 0; i < frames_.size(); ++i) {
      const auto& [rank, end] = place_.children[i];
      const auto received = DecodeRankedMessages(Unpack(frames_[i]), rank, end);
      SHVD_TRY(received.status().Annotate("from rank " + std::to_string(rank)));
      for (const RankedMessage& message : received.value()) Append(messages, message);
    }
    return Status();
  }

  // Starts to send the messages of this rank and the ranks below, and to receive the answer.
  Status Report() {
    const std::vector<std::byte> own = Encode(own_);
    std::vector<RankedMessage> messages = {
        RankedMessage{transport_.rank(), 1, ConstBytes(own.data(), own.size())}};
    SHVD_TRY(AddFromBelow(messages));
    packed_ = Pack(Encode(messages));
    SHVD_TRY(PostFrame(transport_, place_.parent, answer_, tickets_));
    return PostPacked(transport_, place_.parent, packed_, tickets_);
  }

  Result<ResponseMessage> Coordinate() {
    std::vector<RankedMessage> messages;
    SHVD_TRY(AddFromBelow(messages));
    const auto now = Deadline::Clock::now();
    SHVD_TRY(readiness_.Add(kCoordinator, own_, cache_, now));
    for (const RankedMessage& ranked : messages) {
      const Result<RequestMessage> message = DecodeRequestMessage(ranked.content);
      SHVD_TRY(message.status().Annotate("from rank " + std::to_string(ranked.first)));
      for (int rank = ranked.first; rank < ranked.first + ranked.count; ++rank) {
        SHVD_TRY(readiness_.Add(rank, message.value(), cache_, now));
      }
    }
    ResponseMessage response = Decide(now, timeout_s_, own_.retuning);
    if (!frames_.empty()) answer_ = Pack(Encode(response));
    return response;
  }

  Result<ResponseMessage> Follow(Deadline deadline) {
    if (!frames_.empty()) SHVD_TRY(Report());
    const Deadline patient = Longest(deadline);
    const std::string context = "waiting for the coordinator, rank 0";
    SHVD_TRY(WaitAll(transport_, tickets_, patient).Annotate(context));
    tickets_.clear();
    SHVD_TRY(PostRest(transport_, place_.parent, answer_, tickets_));
    SHVD_TRY(WaitAll(transport_, tickets_, patient).Annotate(context));
    tickets_.clear();
    return DecodeResponseMessage(Unpack(answer_));
  }

  // Passes the answer on to the ranks below.
  Status PassOn(Deadline deadline) {
    for (const PlaceInTree::Child& child : place_.children) {
      SHVD_TRY(PostPacked(transport_, child.rank, answer_, tickets_));
    }
    return WaitAll(transport_, tickets_, deadline).Annotate("answering the other ranks");
  }

  Transport& transport_;
  const double timeout_s_;
  const PlaceInTree place_;
  const int height_of_all_;

  // The state of the current cycle. Each child has one of the frames, in the same order.
  RequestMessage own_;
  std::vector<std::byte> packed_;
  std::vector<Frame> frames_;
  Frame answer_;
  std::vector<Ticket> tickets_;
};

}  // namespace

std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s, int fan_in) {
  return std::make_unique<CoordinatedNegotiation>(transport, cache_capacity, collective_timeout_s,
                                                  fan_in);
}

}  // namespace sparkhvd
