// Decides which thread of a rank runs its cycles, and when.
#pragma once

#include <atomic>
#include <optional>

#include "base/deadline.h"
#include "base/status.h"
#include "scheduler/cycle.h"
#include "scheduler/dispatcher.h"
#include "scheduler/lifecycle.h"
#include "scheduler/operation.h"
#include "scheduler/submission_queue.h"

namespace sparkhvd {

// One thread at a time has the turn to drive the cycles. A thread that waits for an operation
// drives while it waits, because handing a small operation to another thread and back takes longer
// than the operation. The engine's own thread drives when there is work and no other thread does.
class CycleDriver {
 public:
  struct Parts {
    SubmissionQueue& queue;
    Lifecycle& lifecycle;
    Cycle& cycle;
    Dispatcher& dispatcher;
  };

  // If `waiters_drive`, threads that wait for an operation may drive.
  CycleDriver(const Parts& parts, bool waiters_drive)
      : parts_(parts), waiters_drive_(waiters_drive) {}

  // The work of the engine's thread. Returns once the queue is closed and every operation has its
  // outcome.
  void RunUntilEnd();

  // Drives cycles until the operation is done or other ranks have to act first. Returns at once if
  // another thread drives.
  void DriveUntilDone(const Operation& operation, Deadline deadline);

  // Waits for the outcome of an operation, and drives meanwhile if this thread may.
  Status Await(Operation& operation, Deadline deadline);
  bool has_waiters() const { return waiters_ > 0; }

 private:
  // The following functions need the turn.
  void RunCycle(Deadline patience) noexcept;
  bool WatchDevice() noexcept;
  SubmissionQueue::Due NextDue() const;
  bool CycleIsDue() const;

  const Parts parts_;
  const bool waiters_drive_;
  std::atomic<int> waiters_{0};  // threads in Await
  // When to check a busy device again.
  Deadline::Clock::time_point next_watch_ = SubmissionQueue::kAtOnce;
};

}  // namespace sparkhvd
