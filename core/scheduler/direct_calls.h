// Collectives that ranks of one host call in the same order, without the engine.
#pragma once

#include <cstddef>
#include <functional>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// No names and no negotiation: what meets is what every rank calls first, second, third. The calls
// have an arena of their own, so that the engine may be busy with anything meanwhile. One call at a
// time.
class DirectCalls {
 public:
  explicit DirectCalls(Arena& arena) : steps_(arena) {}

  // Reduces `count` elements of every rank into `target`, which may be `source`. While it waits for
  // the other ranks to come it asks `interrupted` from time to time and fails with kAborted when
  // told so. kMismatch on all ranks, which then may go on, when they bring different things; after
  // any other failure no further call can work.
  Status Allreduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                   size_t count, Deadline deadline, const std::function<bool()>& interrupted);

 private:
  Status Meet(Deadline deadline, const std::function<bool()>& interrupted);

  ArenaSteps steps_;
};

}  // namespace sparkhvd
