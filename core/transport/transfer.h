// A posted message and how much of it has moved.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

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

}  // namespace sparkhvd
