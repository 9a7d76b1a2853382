// Negotiation over links. Every rank sends one message to the coordinator and receives one. A
// message is a frame of fixed length, which suffices in the steady state. A second transfer carries
// the rest of a longer message.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "scheduler/negotiation.h"

namespace sparkhvd {
namespace {

using Frame = std::vector<std::byte>;

constexpr int kCoordinator = 0;
constexpr size_t kFrameBytes = 256;
constexpr size_t kLengthBytes = sizeof(uint32_t);

// A rank waits a little longer for the coordinator than the coordinator waits for the ranks,
// because the coordinator's error names the missing ranks.
constexpr double kPatienceShare = 0.5;
constexpr double kPatienceSeconds = 2.0;

// Returns the message after its length, padded to a whole frame.
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

class CoordinatedNegotiation final : public Negotiation {
 public:
  CoordinatedNegotiation(Transport& transport, size_t cache_capacity, double timeout_s)
      : Negotiation(transport.size(), cache_capacity),
        transport_(transport),
        timeout_s_(timeout_s),
        frames_(static_cast<size_t>(transport.size())) {}

  Bytes Announce(const RequestMessage& message) override {
    own_ = message;
    return Bytes();
  }

  Status Enter() override {
    tickets_.clear();
    if (coordinates()) {
      for (int peer = 1; peer < transport_.size(); ++peer) {
        SHVD_TRY(PostFrame(transport_, peer, frames_[static_cast<size_t>(peer)], tickets_));
      }
      return Status();
    }
    packed_ = Pack(Encode(own_));
    SHVD_TRY(PostFrame(transport_, kCoordinator, frames_[kCoordinator], tickets_));
    return PostPacked(transport_, kCoordinator, packed_, tickets_);
  }

  Result<Outcome> Conclude(Deadline deadline) override {
    Result<ResponseMessage> response =
        coordinates() ? Coordinate(deadline) : Follow(deadline.Later(Patience()));
    SHVD_TRY(response.status());
    return Outcome{std::move(response).value(), std::nullopt};
  }

  // Interrupting a wait over links breaks the links. A single rank has nothing to wait for.
  bool interruptible() const override { return transport_.size() == 1; }

 private:
  bool coordinates() const { return transport_.rank() == kCoordinator; }

  std::chrono::duration<double> Patience() const {
    return std::chrono::duration<double>(std::min(timeout_s_ * kPatienceShare, kPatienceSeconds));
  }

  Status CollectFromAll(Deadline deadline) {
    SHVD_TRY(WaitAll(transport_, tickets_, deadline));
    tickets_.clear();
    for (int peer = 1; peer < transport_.size(); ++peer) {
      SHVD_TRY(PostRest(transport_, peer, frames_[static_cast<size_t>(peer)], tickets_));
    }
    return WaitAll(transport_, tickets_, deadline);
  }

  Result<ResponseMessage> Coordinate(Deadline deadline) {
    SHVD_TRY(CollectFromAll(deadline).Annotate("waiting for the other ranks' requests"));
    const auto now = Deadline::Clock::now();
    SHVD_TRY(readiness_.Add(kCoordinator, own_, cache_, now));
    for (int peer = 1; peer < transport_.size(); ++peer) {
      const Result<RequestMessage> message =
          DecodeRequestMessage(Unpack(frames_[static_cast<size_t>(peer)]));
      SHVD_TRY(message.status().Annotate("from rank " + std::to_string(peer)));
      SHVD_TRY(readiness_.Add(peer, message.value(), cache_, now));
    }
    ResponseMessage response = Decide(now, timeout_s_, own_.retuning);
    if (transport_.size() == 1) return response;
    packed_ = Pack(Encode(response));
    tickets_.clear();
    for (int peer = 1; peer < transport_.size(); ++peer) {
      SHVD_TRY(PostPacked(transport_, peer, packed_, tickets_));
    }
    SHVD_TRY(WaitAll(transport_, tickets_, deadline).Annotate("answering the other ranks"));
    return response;
  }

  Result<ResponseMessage> Follow(Deadline deadline) {
    const std::string context = "waiting for the coordinator, rank 0";
    std::vector<std::byte>& frame = frames_[kCoordinator];
    SHVD_TRY(WaitAll(transport_, tickets_, deadline).Annotate(context));
    tickets_.clear();
    SHVD_TRY(PostRest(transport_, kCoordinator, frame, tickets_));
    SHVD_TRY(WaitAll(transport_, tickets_, deadline).Annotate(context));
    return DecodeResponseMessage(Unpack(frame));
  }

  Transport& transport_;
  const double timeout_s_;

  // The state of the current cycle. Frames are indexed by rank.
  RequestMessage own_;
  std::vector<std::byte> packed_;
  std::vector<Frame> frames_;
  std::vector<Ticket> tickets_;
};

}  // namespace

std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s) {
  return std::make_unique<CoordinatedNegotiation>(transport, cache_capacity, collective_timeout_s);
}

}  // namespace sparkhvd
