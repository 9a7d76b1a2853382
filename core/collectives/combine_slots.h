// Reduces the slots of all members.
#pragma once

#include "collectives/arena_steps.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {

// Combines the elements of `slice` from the slots of all members (at least two) and writes the
// finished result to `target`. It combines in member order, so the result does not depend on the
// member that computes it.
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
