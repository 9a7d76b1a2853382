// A posted message and how much of it has moved; the messages that are posted on a link.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

#include "base/span.h"
#include "base/status.h"
#include "transport/failures.h"
#include "transport/message_header.h"
#include "transport/transport.h"

namespace sparkhvd {

struct Transfer {
  Ticket ticket;
  std::byte* data;  // a send only reads it
  size_t size;
  size_t* length;  // set by a receive that learns its size from the header; null otherwise
  std::array<std::byte, kMessageHeaderBytes> header;
  size_t done = 0;  // bytes of header and data that have moved

  size_t total() const { return kMessageHeaderBytes + size; }
  size_t payload_done() const { return done - std::min(done, kMessageHeaderBytes); }

  // Takes the length from the header of a message of `peer`. Fails if another one was expected.
  Status SetLength(uint64_t sent, int peer) {
    if (length == nullptr) return sent == size ? Status() : LengthMismatch(peer, sent, size);
    if (sent > size) return LengthMismatch(peer, sent, size, kAtMost);
    size = *length = sent;
    length = nullptr;
    return Status();
  }
};

// The messages of one link that have not moved completely, in the order in which they were posted.
struct TransferQueues {
  std::deque<Transfer> sends;
  std::deque<Transfer> receives;

  bool empty() const { return sends.empty() && receives.empty(); }

  void Post(Direction direction, const Transfer& transfer) {
    (direction == Direction::kSend ? sends : receives).push_back(transfer);
  }

  const Transfer* Find(Ticket ticket, Direction* direction) const {
    for (const auto* queue : {&sends, &receives}) {
      for (const Transfer& transfer : *queue) {
        if (transfer.ticket != ticket) continue;
        *direction = queue == &sends ? Direction::kSend : Direction::kReceive;
        return &transfer;
      }
    }
    return nullptr;
  }

  void Clear() {
    sends.clear();
    receives.clear();
  }
};

inline const Ticket* FirstOpen(Span<const Ticket> tickets, const std::unordered_set<Ticket>& open) {
  for (const Ticket& ticket : tickets) {
    if (open.count(ticket) != 0) return &ticket;
  }
  return nullptr;
}

// Returns the failure of an open ticket at its deadline. A link has a peer() and its transfers().
template <typename Link>
Status LateTicket(const std::vector<Link>& links, Ticket ticket) {
  for (const Link& link : links) {
    Direction direction{};
    const Transfer* transfer = link.transfers().Find(ticket, &direction);
    if (transfer == nullptr) continue;
    return LateTransfer(direction, link.peer(), transfer->payload_done(), transfer->size,
                        transfer->length != nullptr ? kAtMost : kExactly);
  }
  return Status(StatusCode::kInternal, "an open ticket belongs to no link");
}

}  // namespace sparkhvd
