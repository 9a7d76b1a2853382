#include "base/sha256.h"

#include <algorithm>
#include <cstring>

namespace sparkhvd {
namespace {

constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t RotateRight(uint32_t value, int bits) { return (value >> bits) | (value << (32 - bits)); }

uint32_t LoadBigEndian(const std::byte* from) {
  return (std::to_integer<uint32_t>(from[0]) << 24) | (std::to_integer<uint32_t>(from[1]) << 16) |
         (std::to_integer<uint32_t>(from[2]) << 8) | std::to_integer<uint32_t>(from[3]);
}

template <typename Word>
void StoreBigEndian(Word value, std::byte* to) {
  for (size_t i = 0; i < sizeof(Word); ++i) {
    to[i] = static_cast<std::byte>((value >> (8 * (sizeof(Word) - 1 - i))) & 0xff);
  }
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::Update(ConstBytes data) {
  size_t offset = 0;
  while (offset < data.size()) {
    const size_t used = length_ % block_.size();
    const size_t count = std::min(block_.size() - used, data.size() - offset);
    std::memcpy(block_.data() + used, data.data() + offset, count);
    offset += count;
    length_ += count;
    if (used + count == block_.size()) Compress(block_.data());
  }
}

Digest Sha256::Finish() {
  std::array<std::byte, 8> bits;
  StoreBigEndian(length_ * 8, bits.data());
  constexpr std::array<std::byte, 64> kPadding = {std::byte{0x80}};
  const size_t used = length_ % 64;
  Update(ConstBytes(kPadding.data(), (used < 56 ? 56 : 120) - used));
  Update(ConstBytes(bits.data(), bits.size()));
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) StoreBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

void Sha256::Compress(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) w[t] = LoadBigEndian(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = RotateRight(w[t - 15], 7) ^ RotateRight(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = RotateRight(w[t - 2], 17) ^ RotateRight(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  // FIPS 180-4 calls the working variables a to h.
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = RotateRight(e, 6) ^ RotateRight(e, 11) ^ RotateRight(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t t1 = h + sum1 + choice + kRoundConstants[t] + w[t];
    const uint32_t sum0 = RotateRight(a, 2) ^ RotateRight(a, 13) ^ RotateRight(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + sum0 + majority;
  }
  const std::array<uint32_t, 8> working = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) state_[i] += working[i];
}

Digest HmacSha256(ConstBytes key, ConstBytes message) {
  std::array<std::byte, 64> block{};
  if (key.size() > block.size()) {
    Sha256 hash;
    hash.Update(key);
    const Digest digest = hash.Finish();
    std::memcpy(block.data(), digest.data(), digest.size());
  } else if (!key.empty()) {
    std::memcpy(block.data(), key.data(), key.size());
  }
  std::array<std::byte, 64> inner_pad;
  std::array<std::byte, 64> outer_pad;
  for (size_t i = 0; i < block.size(); ++i) {
    inner_pad[i] = block[i] ^ std::byte{0x36};
    outer_pad[i] = block[i] ^ std::byte{0x5c};
  }
  Sha256 inner;
  inner.Update(ConstBytes(inner_pad.data(), inner_pad.size()));
  inner.Update(message);
  const Digest inner_digest = inner.Finish();
  Sha256 outer;
  outer.Update(ConstBytes(outer_pad.data(), outer_pad.size()));
  outer.Update(ConstBytes(inner_digest.data(), inner_digest.size()));
  return outer.Finish();
}

bool EqualInConstantTime(ConstBytes left, ConstBytes right) {
  if (left.size() != right.size()) return false;
  std::byte difference{0};
  for (size_t i = 0; i < left.size(); ++i) difference |= left[i] ^ right[i];
  // `volatile` prevents the compiler from ending the loop at the first difference.
  volatile std::byte result = difference;
  return result == std::byte{0};
}

}  // namespace sparkhvd
