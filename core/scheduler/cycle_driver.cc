#include "scheduler/cycle_driver.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/default_arithmetic.h"
#include "base/spin.h"

namespace sparkhvd {
namespace {

using Clock = Deadline::Clock;
using Turn = SubmissionQueue::Turn;

// The interval at which an otherwise idle engine checks a busy device.
constexpr std::chrono::milliseconds kDeviceInterval(50);

}  // namespace

void CycleDriver::RunUntilEnd() {
  for (Turn turn = parts_.queue.AwaitTurn(); turn != Turn::kClosed;
       turn = parts_.queue.AwaitNextTurn(NextDue())) {
    if (parts_.dispatcher.device_busy() && !WatchDevice()) continue;
    if (turn == Turn::kSubmissions || CycleIsDue()) RunCycle(Deadline::Never());
  }
  parts_.cycle.DropPending();
  parts_.dispatcher.FailAll(parts_.lifecycle.Reason());
  static_cast<void>(Guarded([this] {
    parts_.dispatcher.LeaveDevices();
    return Status();
  }));
}

void CycleDriver::DriveUntilDone(const Operation& operation, Deadline deadline) {
  if (!parts_.queue.TryTurn()) return;
  bool progress = true;
  while (progress && !operation.done() && !parts_.queue.closed()) {
    RunCycle(deadline);
    progress = parts_.cycle.made_progress();
  }
  parts_.queue.EndTurn(NextDue());
}

Status CycleDriver::Await(Operation& operation, Deadline deadline) {
  if (operation.done()) return operation.Wait(deadline);
  ++waiters_;
  if (waiters_drive_) {
    DriveUntilDone(operation, deadline);
  } else {
    parts_.queue.StartNow();
  }
  const Status status = operation.Wait(deadline);
  --waiters_;
  return status;
}

void CycleDriver::RunCycle(Deadline patience) noexcept {
  const DefaultArithmetic arithmetic;
  std::optional<SpinsLong> spins;
  if (has_waiters()) spins.emplace();  // the program has nothing else to do on this core
  const Status status = parts_.cycle.Run(patience);
  if (!status.ok()) parts_.lifecycle.EndTogether(status);
  next_watch_ = SubmissionQueue::kAtOnce;
}

// Returns false if the engine has ended.
bool CycleDriver::WatchDevice() noexcept {
  const Status status = Guarded([this] { return parts_.dispatcher.WatchDevice(); });
  if (!status.ok()) parts_.lifecycle.EndTogether(status);
  next_watch_ = Clock::now() + kDeviceInterval;
  return status.ok();
}

SubmissionQueue::Due CycleDriver::NextDue() const {
  const SubmissionQueue::Due cycle = parts_.cycle.due();
  if (!parts_.dispatcher.device_busy()) return cycle;
  return cycle ? std::min(*cycle, next_watch_) : next_watch_;
}

bool CycleDriver::CycleIsDue() const {
  const SubmissionQueue::Due due = parts_.cycle.due();
  return due && (*due == SubmissionQueue::kAtOnce || Clock::now() >= *due);
}

}  // namespace sparkhvd
