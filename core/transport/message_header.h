// What precedes every message on a socket: its length, so that a disagreement is noticed, or a
// farewell.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kMessageHeaderBytes = 8;
constexpr size_t kMaxFarewellBytes = 1024;

// A rank that aborts says why, as the last thing that it sends: the header of a farewell and the
// text.
struct MessageHeader {
  bool farewell = false;
  uint64_t length = 0;                     // of the payload or of the text
  StatusCode code = StatusCode::kAborted;  // of a farewell
};

std::array<std::byte, kMessageHeaderBytes> EncodeMessageHeader(const MessageHeader& header);
// kInternal when no rank of ours can have sent these bytes.
Result<MessageHeader> DecodeMessageHeader(ConstBytes bytes);

}  // namespace sparkhvd
