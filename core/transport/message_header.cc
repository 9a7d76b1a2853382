#include "transport/message_header.h"

#include "base/wire.h"

namespace sparkhvd {
namespace {

constexpr uint64_t kFarewellBit = uint64_t{1} << 63;
constexpr int kCodeShift = 32;
constexpr uint64_t kTextMask = 0xffffffff;

}  // namespace

std::array<std::byte, kMessageHeaderBytes> EncodeMessageHeader(const MessageHeader& header) {
  uint64_t word = header.length;
  if (header.farewell) word |= kFarewellBit | (static_cast<uint64_t>(header.code) << kCodeShift);
  std::array<std::byte, kMessageHeaderBytes> bytes;
  StoreLittleEndian(word, bytes.data());
  return bytes;
}

Result<MessageHeader> DecodeMessageHeader(ConstBytes bytes) {
  const Status malformed(StatusCode::kInternal, "malformed message header");
  if (bytes.size() != kMessageHeaderBytes) return malformed;
  const auto word = LoadLittleEndian<uint64_t>(bytes.data());
  MessageHeader header;
  if ((word & kFarewellBit) == 0) {
    header.length = word;
    return header;
  }
  const uint64_t code = (word & ~kFarewellBit) >> kCodeShift;
  header.farewell = true;
  header.length = word & kTextMask;
  if (code == 0 || code > static_cast<uint64_t>(StatusCode::kInternal) ||
      header.length > kMaxFarewellBytes) {
    return malformed;
  }
  header.code = static_cast<StatusCode>(code);
  return header;
}

}  // namespace sparkhvd
