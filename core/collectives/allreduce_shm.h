// Allreduce among the members of an arena.
#pragma once

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// The sizes at which the algorithm changes. They must be equal on all members. They do not affect
// results.
struct ArenaSwitches {
  // Up to this total size of all contributions, every member reduces everything: one step instead
  // of two.
  size_t small_bytes = size_t{32} << 10;
  // Larger buffers are reduced in chunks of this size. The memory of a chunk (its share of the
  // source, the target and all slots) stays in the second-level cache.
  size_t chunk_bytes = size_t{256} << 10;

  bool operator==(const ArenaSwitches& other) const {
    return small_bytes == other.small_bytes && chunk_bytes == other.chunk_bytes;
  }
};

// Returns the size in bytes up to which one step suffices: every member publishes its contribution
// and combines all of them.
size_t SmallAllreduceBytes(const ArenaSteps& steps, const ArenaSwitches& switches = {});

// Reduces `count` elements of every member. All members get bitwise identical results. `target` may
// be `source`.
Status AllreduceShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                    std::byte* target, size_t count, Deadline deadline,
                    const ArenaSwitches& switches = {});

}  // namespace sparkhvd
