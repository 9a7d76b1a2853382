// The settings that may change between two cycles. They are equal on all ranks.
#pragma once

#include <cstddef>

#include "collectives/allreduce_shm.h"

namespace sparkhvd {

struct Tunables {
  size_t fusion_threshold = size_t{64} << 20;  // of PlanFusion
  ArenaSwitches arena;
  bool hierarchical = true;  // whether allreduces across hosts use each host's shared memory

  bool operator==(const Tunables& other) const {
    return fusion_threshold == other.fusion_threshold && arena == other.arena &&
           hierarchical == other.hierarchical;
  }
};

// New settings that rank 0 sends to all ranks.
struct Retuning {
  Tunables tunables;
  bool last = false;  // no other retuning follows
};

}  // namespace sparkhvd
