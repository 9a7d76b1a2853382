// The tree along which the messages of a negotiation travel to rank 0 and back.
#pragma once

#include <vector>

namespace sparkhvd {

// A rank's place in the tree. With ranks written in base `fan_in`, the parent of a rank is the rank
// whose last non-zero digit is set to 0. So the ranks below a rank are consecutive and follow it.
struct PlaceInTree {
  struct Child {
    int rank;
    int end;  // the child and the ranks below it end before this rank
  };

  // Requires a `fan_in` of at least 2.
  PlaceInTree(int rank, int size, int fan_in);

  int parent = -1;              // -1 at rank 0
  std::vector<Child> children;  // ascending
  int height = 0;               // an upper limit of the levels below; 0 without children
};

}  // namespace sparkhvd
