// What the engine does for operations in the memory of devices.
#include <chrono>

#include "scheduler/engine.h"

namespace sparkhvd {
namespace {

// A rank whose device is at work may wait for others without being in a cycle with them, so that
// it has to look for their failures.
constexpr std::chrono::seconds kLookInterval(1);

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
  const Waiting waiting{deadline, [this] { return Trouble(); }};
  return devices_.Run(group, waiting, [&](Bytes bytes) {
    return execution_.Broadcast(0, bytes.data(), bytes, deadline);
  });
}

// While nobody else steers.
void Engine::WatchDevice(std::unique_lock<std::mutex>& lock) {
  steered_ = true;
  lock.unlock();
  Status status = devices_.Watch();
  if (status.ok() && devices_.busy()) status = Trouble();
  if (!status.ok()) End(FirstFailure(status));
  lock.lock();
  steered_ = false;
}

// Why it is no use to wait for a device any longer.
Status Engine::Trouble() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_) return *end_;
  }
  const auto now = Deadline::Clock::now();
  if (now < next_look_) return Status();
  next_look_ = now + kLookInterval;
  return board_.Look();
}

// Once nothing can be submitted any more.
void Engine::LeaveDevices() {
  const bool orderly = Failure().ok();
  devices_.Leave(orderly);
  board_.LookAway();
  if (will_ && orderly) will_->Withdraw();
  will_.reset();
}

}  // namespace sparkhvd
