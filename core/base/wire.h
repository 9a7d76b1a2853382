// Encodes integers as little-endian bytes, the byte order of all messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparkhvd {

template <typename Word>
void StoreLittleEndian(Word value, std::byte* to) {
  for (size_t i = 0; i < sizeof(Word); ++i) {
    to[i] = static_cast<std::byte>((static_cast<uint64_t>(value) >> (8 * i)) & 0xff);
  }
}

template <typename Word>
Word LoadLittleEndian(const std::byte* from) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Word); ++i) value |= std::to_integer<uint64_t>(from[i]) << (8 * i);
  return static_cast<Word>(value);
}

}  // namespace sparkhvd
