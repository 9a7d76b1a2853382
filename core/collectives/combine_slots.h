// The reduction of what the members of an arena have shown each other.
#pragma once

#include "collectives/arena_steps.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {

// Combines and finishes the elements of `slice` that all members (two at least) have in their slots
// into `target`: in member order, so that a result doesn't depend on who computes it.
inline void CombineSlots(const ArenaSteps& steps, const ArenaSteps::Round& round,
                         const Reduction& reduction, std::byte* target, Slice slice) {
  const size_t offset = slice.begin * SizeOf(reduction.dtype);
  Combine(reduction.dtype, reduction.op, target, round.Slot(0) + offset, round.Slot(1) + offset,
          slice.count);
  for (int member = 2; member < steps.count(); ++member) {
    Combine(reduction.dtype, reduction.op, target, target, round.Slot(member) + offset,
            slice.count);
  }
  Finish(reduction, steps.count(), target, slice.count);
}

}  // namespace sparkhvd
