// The header of every message on a socket: a farewell, or the payload's length, by which the
// receiver detects a disagreement.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kMessageHeaderBytes = 8;
constexpr size_t kMaxFarewellBytes = 1024;

// A rank that aborts sends its reason last: the header of a farewell, then the text.
struct MessageHeader {
  bool farewell = false;
  uint64_t length = 0;                     // of the payload or the text
  StatusCode code = StatusCode::kAborted;  // of a farewell
};

std::array<std::byte, kMessageHeaderBytes> EncodeMessageHeader(const MessageHeader& header);
// Fails with kInternal for bytes that no rank of this version sends.
Result<MessageHeader> DecodeMessageHeader(ConstBytes bytes);

}  // namespace sparkhvd
