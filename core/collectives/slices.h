// Divides a range of elements among ranks.
#pragma once

#include <cstddef>
#include <vector>

namespace sparkhvd {

constexpr size_t kCacheLine = 64;

struct Slice {
  size_t begin = 0;
  size_t count = 0;
};

// Returns slice `index` of the `parts` slices of `count` elements. The slices are contiguous, in
// order and cover all elements. Their lengths differ by at most one `grain`, a number of elements
// that should stay together, such as a cache line. Some slices are empty if there are few elements.
inline Slice SliceOf(size_t count, int parts, int index, size_t grain = 1) {
  const size_t grains = (count + grain - 1) / grain;
  const auto total = static_cast<size_t>(parts);
  const auto position = static_cast<size_t>(index);
  const size_t base = grains / total;
  const size_t extra = grains % total;
  const size_t first = position * base + (position < extra ? position : extra);
  const size_t length = base + (position < extra ? 1 : 0);
  const size_t begin = first * grain < count ? first * grain : count;
  const size_t end = (first + length) * grain < count ? (first + length) * grain : count;
  return Slice{begin, end - begin};
}

// Returns all slices in order.
inline std::vector<Slice> EvenSlices(size_t count, int parts, size_t grain = 1) {
  std::vector<Slice> slices;
  for (int index = 0; index < parts; ++index) slices.push_back(SliceOf(count, parts, index, grain));
  return slices;
}

}  // namespace sparkhvd
