// The settings that may change between two cycles, the same ones on all ranks.
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

// New settings that rank 0 sends to all ranks.
struct Retuning {
  Tunables tunables;
  bool last = false;  // no other will follow
};

}  // namespace sparkhvd
