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
  DeviceExecution::Links links;
  links.share = [&](Bytes bytes) { return execution_.Broadcast(0, bytes.data(), bytes, deadline); };
  links.highest = [&](int64_t* number) { return execution_.Highest(number, deadline); };
  return devices_.Run(group, waiting, links);
}

// While nobody else steers.
void Engine::WatchDevice(std::unique_lock<std::mutex>& lock) {
  steered_ = true;
  lock.unlock();
  const Status status = Guarded([this] {
    SHVD_TRY(devices_.Watch());
    return devices_.busy() ? Trouble() : Status();
  });
  if (!status.ok()) EndTogether(status);
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
  devices_.Leave(orderly ? [this](Deadline deadline) { return board_.Meet(rank_, size_, deadline); }
                         : DeviceExecution::Meet());
  board_.LookAway();
  if (will_ && orderly) will_->Withdraw();
  will_.reset();
}

}  // namespace sparkhvd
