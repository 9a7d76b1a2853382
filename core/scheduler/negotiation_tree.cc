#include "scheduler/negotiation_tree.h"

#include <algorithm>
#include <cstdint>

namespace sparkhvd {

PlaceInTree::PlaceInTree(int rank, int size, int fan_in) {
  int64_t unit = 1;  // the value of the digit
  while (unit < size && (rank / unit) % fan_in == 0) {
    for (int64_t digit = 1; digit < fan_in; ++digit) {
      const int64_t child = rank + digit * unit;
      if (child >= size) break;
      children.push_back(
          Child{static_cast<int>(child), static_cast<int>(std::min<int64_t>(child + unit, size))});
    }
    if (!children.empty()) ++height;
    unit *= fan_in;
  }
  if (rank > 0) parent = static_cast<int>(rank - rank % (unit * fan_in));
}

}  // namespace sparkhvd
