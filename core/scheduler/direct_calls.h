// Collectives that ranks of one host call in the same order, without the engine.
#pragma once

#include <cstddef>
#include <functional>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// Calls have no names and no negotiation: the first calls of all ranks match each other, then the
// second calls, and so on. The calls have their own arena, so they may run while the engine is
// busy. Only one call may run at a time.
class DirectCalls {
 public:
  explicit DirectCalls(Arena& arena) : steps_(arena) {}

  // Reduces `count` elements of every rank into `target`, which may be `source`. Polls
  // `interrupted` while it waits for the other ranks, and fails with kAborted once `interrupted`
  // returns true. If the calls differ, it fails with kMismatch on all ranks, which may then
  // continue. After any other failure, no further call can work.
  Status Allreduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                   size_t count, Deadline deadline, const std::function<bool()>& interrupted);

 private:
  Status AwaitCalls(Deadline deadline, const std::function<bool()>& interrupted);

  ArenaSteps steps_;
};

}  // namespace sparkhvd
