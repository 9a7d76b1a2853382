// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/span.h"

namespace sparkhvd {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256();
  void Update(ConstBytes data);
  // Returns the digest of all bytes passed to Update. The object must not be used afterwards.
  Digest Finish();

 private:
  void Compress(const std::byte* block);

  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  uint64_t length_ = 0;  // bytes hashed so far
};

Digest HmacSha256(ConstBytes key, ConstBytes message);

// The time of the comparison depends only on the lengths.
bool EqualInConstantTime(ConstBytes left, ConstBytes right);

inline ConstBytes AsBytes(std::string_view text) {
  return ConstBytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

}  // namespace sparkhvd
