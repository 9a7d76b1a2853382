#include "scheduler/negotiation.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

namespace sparkhvd {
namespace {

constexpr int kCoordinator = 0;
constexpr size_t kFrameBytes = 256;
constexpr size_t kLengthBytes = sizeof(uint32_t);

// A rank waits a little longer for the coordinator than the coordinator for the ranks, because the
// coordinator knows who is missing and its complaint is the better one.
constexpr double kPatienceShare = 0.5;
constexpr double kPatienceSeconds = 2.0;

// The message behind its length, filled up to a whole frame.
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
    return Status(StatusCode::kInternal, "a message of " + std::to_string(length) +
                                             " bytes in the negotiation is beyond its limit");
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

// Once a frame has come: the transfer of what did not fit into it.
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

// The message inside a complete frame.
ConstBytes Unpack(const std::vector<std::byte>& frame) {
  uint32_t length = 0;
  std::memcpy(&length, frame.data(), kLengthBytes);
  return ConstBytes(frame.data() + kLengthBytes, length);
}

}  // namespace

RequestMessage Negotiation::Report(const std::vector<const Request*>& submitted) const {
  RequestMessage message;
  for (const Request* request : submitted) {
    if (const std::optional<uint32_t> id = cache_.Find(*request)) {
      message.cached.push_back(*id);
    } else {
      message.requests.push_back(*request);
    }
  }
  std::sort(message.cached.begin(), message.cached.end());
  return message;
}

Result<ResponseMessage> Negotiation::Cycle(const RequestMessage& message) {
  return transport_.rank() == kCoordinator ? Coordinate(message) : Follow(message);
}

void Negotiation::Remember(const Request& own, const std::vector<int64_t>& first_dims) {
  if (const std::optional<uint32_t> id = cache_.NextId(own.name)) readiness_.Forget(*id, cache_);
  cache_.Insert(own, first_dims);
}

Status Negotiation::CollectFromAll(Deadline deadline) {
  std::vector<Ticket> tickets;
  for (int peer = 1; peer < transport_.size(); ++peer) {
    SHVD_TRY(PostFrame(transport_, peer, frames_[static_cast<size_t>(peer)], tickets));
  }
  SHVD_TRY(WaitAll(transport_, tickets, deadline));
  tickets.clear();
  for (int peer = 1; peer < transport_.size(); ++peer) {
    SHVD_TRY(PostRest(transport_, peer, frames_[static_cast<size_t>(peer)], tickets));
  }
  return WaitAll(transport_, tickets, deadline);
}

Result<ResponseMessage> Negotiation::Coordinate(const RequestMessage& own) {
  const Deadline deadline = Deadline::AfterSeconds(timeout_s_);
  SHVD_TRY(CollectFromAll(deadline).Annotate("waiting for the other ranks' requests"));
  const auto now = Deadline::Clock::now();
  SHVD_TRY(readiness_.Add(kCoordinator, own, cache_, now));
  for (int peer = 1; peer < transport_.size(); ++peer) {
    const Result<RequestMessage> message =
        DecodeRequestMessage(Unpack(frames_[static_cast<size_t>(peer)]));
    SHVD_TRY(message.status().Annotate("from rank " + std::to_string(peer)));
    SHVD_TRY(readiness_.Add(peer, message.value(), cache_, now));
  }
  ResponseMessage response = readiness_.TakeComplete();
  const auto patience = std::chrono::duration_cast<Deadline::Clock::duration>(
      std::chrono::duration<double>(std::min(timeout_s_, 3.0e9)));
  std::vector<Agreement> overdue = readiness_.TakeOverdue(cache_, now - patience);
  response.agreements.insert(response.agreements.end(), std::make_move_iterator(overdue.begin()),
                             std::make_move_iterator(overdue.end()));
  if (transport_.size() == 1) return response;
  const std::vector<std::byte> packed = Pack(Encode(response));
  std::vector<Ticket> tickets;
  for (int peer = 1; peer < transport_.size(); ++peer) {
    SHVD_TRY(PostPacked(transport_, peer, packed, tickets));
  }
  SHVD_TRY(WaitAll(transport_, tickets, deadline).Annotate("answering the other ranks"));
  return response;
}

Result<ResponseMessage> Negotiation::Follow(const RequestMessage& own) {
  const double patience = std::min(timeout_s_ * kPatienceShare, kPatienceSeconds);
  const Deadline deadline = Deadline::AfterSeconds(timeout_s_ + patience);
  std::vector<std::byte>& frame = frames_[kCoordinator];
  const std::vector<std::byte> packed = Pack(Encode(own));
  const std::string context = "waiting for the coordinator, rank 0";
  std::vector<Ticket> tickets;
  SHVD_TRY(PostFrame(transport_, kCoordinator, frame, tickets).Annotate(context));
  SHVD_TRY(PostPacked(transport_, kCoordinator, packed, tickets).Annotate(context));
  SHVD_TRY(WaitAll(transport_, tickets, deadline).Annotate(context));
  tickets.clear();
  SHVD_TRY(PostRest(transport_, kCoordinator, frame, tickets));
  SHVD_TRY(WaitAll(transport_, tickets, deadline).Annotate(context));
  return DecodeResponseMessage(Unpack(frame));
}

}  // namespace sparkhvd
