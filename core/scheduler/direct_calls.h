// Collectives that ranks of one host call in the same order, without the engine.
#pragma once

#include <cstddef>
#include <functional>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// No names and no negotiation: the first calls of all ranks are matched, then the second ones, and
// so on. The calls have an arena of their own, so that the engine may be busy meanwhile. One call
// at a time.
class DirectCalls {
 public:
  explicit DirectCalls(Arena& arena) : steps_(arena) {}

  // Reduces `count` elements of every rank into `target`, which may be `source`. While it waits for
  // the other ranks it polls `interrupted` and fails with kAborted if that returns true. kMismatch
  // on all ranks, which may then continue, when their calls differ; after any other failure no
  // further call can work.
  Status Allreduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                   size_t count, Deadline deadline, const std::function<bool()>& interrupted);

 private:
  Status AwaitCalls(Deadline deadline, const std::function<bool()>& interrupted);

  ArenaSteps steps_;
};

}  // namespace sparkhvd
