// The engine's handling of operations in device memory.
#include <chrono>

#include "scheduler/engine.h"

namespace sparkhvd {
namespace {

// A rank with a busy device may wait for other ranks outside a cycle, so it must poll for their
// failures.
constexpr std::chrono::seconds kCheckInterval(1);

}  // namespace

Status Engine::ExecuteOnDevice(const std::vector<Ready>& ready,
                               const std::vector<size_t>& positions, Deadline deadline) {
  std::vector<const Ready*> group;
  for (const size_t position : positions) {
    group.push_back(&ready[position]);
    if (timeline_.on()) {
      timeline_.Enter(ready[position].operation->request().name, Phase::kCollective);
    }
  }
  if (!devices_.connected()) will_ = board_.LeaveWill(rank_);
  ++counters_.on_device;
  const Waiting waiting{deadline, [this] { return CheckForFailure(); }};
  DeviceExecution::Links links;
  links.share = [&](Bytes bytes) { return execution_.Broadcast(0, bytes.data(), bytes, deadline); };
  links.highest = [&](int64_t* number) { return execution_.Highest(number, deadline); };
  return devices_.Run(group, waiting, links);
}

// Called while no other thread drives the cycle.
void Engine::WatchDevice(std::unique_lock<std::mutex>& lock) {
  driven_ = true;
  lock.unlock();
  const Status status = Guarded([this] {
    SHVD_TRY(devices_.Watch());
    return devices_.busy() ? CheckForFailure() : Status();
  });
  if (!status.ok()) EndTogether(status);
  lock.lock();
  driven_ = false;
}

// Returns the failure that makes waiting for a device futile. OK if there is none.
Status Engine::CheckForFailure() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_) return *end_;
  }
  const auto now = Deadline::Clock::now();
  if (now < next_check_) return Status();
  next_check_ = now + kCheckInterval;
  return board_.Look();
}

// Called once the engine accepts no more operations.
void Engine::LeaveDevices() {
  const bool orderly = Failure().ok();
  devices_.Leave(
      orderly ? [this](Deadline deadline) { return board_.AwaitAllDone(rank_, size_, deadline); }
              : DeviceExecution::EndBarrier());
  board_.StopWatching();
  if (will_ && orderly) will_->Withdraw();
  will_.reset();
}

}  // namespace sparkhvd
