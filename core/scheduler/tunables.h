// What may change between two cycles, on all ranks in the same one.
#pragma once

#include <cstddef>

#include "collectives/allreduce_shm.h"

namespace sparkhvd {

struct Tunables {
  size_t fusion_threshold = size_t{64} << 20;  // of PlanFusion
  ArenaSwitches arena;
  bool hierarchical = true;  // whether allreduces among several hosts use the memory of each

  bool operator==(const Tunables& other) const {
    return fusion_threshold == other.fusion_threshold && arena == other.arena &&
           hierarchical == other.hierarchical;
  }
};

// From rank 0, on the way to everybody.
struct Retuning {
  Tunables tunables;
  bool last = false;  // no other will follow
};

}  // namespace sparkhvd
