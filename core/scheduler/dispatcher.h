// Runs the operations of a cycle, and gives every operation its outcome.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "rendezvous/key_value_store.h"
#include "scheduler/counters.h"
#include "scheduler/device_execution.h"
#include "scheduler/execution.h"
#include "scheduler/lifecycle.h"
#include "scheduler/operation.h"
#include "scheduler/submission_queue.h"
#include "timeline/timeline.h"

namespace sparkhvd {

// A barrier with this name announces that other engines use the ranks' devices from then on.
inline constexpr const char* kShareDeviceName = "devices.share";

// Only the thread that has the turn may use a Dispatcher.
class Dispatcher {
 public:
  struct Parts {
    SubmissionQueue& queue;
    Lifecycle& lifecycle;
    Execution& execution;
    DeviceExecution& devices;
    EngineTimeline& timeline;
    Counters& counters;
  };

  // `label` prefixes failure messages unless it is empty.
  Dispatcher(const Parts& parts, int rank, int size, std::string label, double collective_timeout_s)
      : parts_(parts),
        rank_(rank),
        size_(size),
        label_(std::move(label)),
        collective_timeout_s_(collective_timeout_s) {}

  // Runs operations in this order, fused where possible. After a failure, it runs no further
  // operation: all remaining operations fail with the failure that came first on any rank.
  Status Run(const std::vector<ReadyOperation>& ready);

  // Completes operations whose data the ranks sent with their messages.
  void Combine(const std::vector<ReadyOperation>& ready, const ArenaSteps::Round& round);

  // Gives the operations their outcome and frees their names. Operations that succeeded must be of
  // one kind.
  void Complete(Operations operations, const Status& status) noexcept;

  // Gives every operation in flight this outcome. Call it after the queue is closed.
  void FailAll(const Status& why) noexcept;

  // Returns whether a device may still have work.
  bool device_busy() const { return parts_.devices.busy(); }

  // Returns a failure of a device, or a failure that makes it pointless to wait for the device.
  Status WatchDevice();

  // Ends the work on devices: in an orderly way, or by aborting it if the engine has failed.
  void LeaveDevices();

 private:
  Status RunOnHost(Operations group, const std::vector<int64_t>& rows, Deadline deadline);
  Status RunOnDevice(const std::vector<ReadyOperation>& ready, const std::vector<size_t>& positions,
                     Deadline deadline);

  const Parts parts_;
  const int rank_;
  const int size_;
  const std::string label_;
  const double collective_timeout_s_;
  std::unique_ptr<Will> will_;
};

}  // namespace sparkhvd
