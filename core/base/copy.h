// Copies memory at full bandwidth on every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparkhvd {

// Returns whether `rep movsb` is fast between these addresses on every processor. On AMD's Zen 3
// and 4 it takes several times as long as vector moves if the target is not aligned or begins
// shortly behind the source, counted from the starts of their pages (glibc bug 30994).
inline bool SuitStringMoves(const void* target, const void* source) {
  constexpr uintptr_t kPage = 4096;
  constexpr uintptr_t kApart = 512;
  const auto to = reinterpret_cast<uintptr_t>(target);
  const uintptr_t distance = (to - reinterpret_cast<uintptr_t>(source)) % kPage;
  return to % 64 == 0 && kApart <= distance && distance <= kPage - kApart;
}

// Like std::memcpy, for the data of collectives. Before version 2.39, glibc copies more than a few
// KiB with `rep movsb`. That does not read the target's cache lines, which another processor may
// own, so it is faster than vector moves where the addresses suit it. Fixed-size blocks compile to
// vector moves.
inline void CopyBytes(void* target, const void* source, size_t bytes) {
  if (target == source) return;
  constexpr size_t kBlock = 64;
  if (bytes >= kBlock && SuitStringMoves(target, source)) {
    std::memcpy(target, source, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  for (; bytes >= kBlock; bytes -= kBlock, to += kBlock, from += kBlock) {
    std::memcpy(to, from, kBlock);
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace sparkhvd
