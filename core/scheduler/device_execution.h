// Carries out operations in the memory of CUDA devices, with NCCL.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "device/libraries.h"
#include "device/nccl.h"
#include "device/work.h"
#include "scheduler/operation.h"

namespace sparkhvd {

// One rank's device, the first that it has submitted something on. An operation is done here when
// its work is on a stream of the device, behind what the submitter had put on its own stream; the
// device continues alone, and Watch() checks it.
class DeviceExecution {
 public:
  // `libraries` may be null: then there is no device. `communicator` is equal on all ranks and
  // distinguishes it from others of the process. `shared` is as after ShareDevice().
  DeviceExecution(std::shared_ptr<const DeviceLibraries> libraries, int rank, int size,
                  std::string communicator, bool shared)
      : libraries_(std::move(libraries)),
        rank_(rank),
        size_(size),
        communicator_name_(std::move(communicator)),
        shared_(shared) {}

  // For any thread.

  // The point at which the current work of `submitter` is done, and so its memory is ready.
  Result<std::shared_ptr<const DeviceEvent>> Mark(const DeviceStream& submitter);

  // For the thread that drives the cycle.

  // The ranks' exchanges over the links of the hosts before they start on their devices.
  struct Links {
    std::function<Status(Bytes)> share;       // gives all ranks the bytes of rank 0
    std::function<Status(int64_t*)> highest;  // gives all ranks the highest number of any
  };

  // Runs operations of one kind together; those that are not done by the deadline fail.
  Status Run(const std::vector<const Ready*>& group, const Waiting& waiting, const Links& links);

  // From now on, on all ranks, other communicators use the devices too: see LaunchOrder.
  void ShareDevice() { shared_ = true; }

  // Whether NCCL connects the ranks, which it does from the first Run on.
  bool connected() const { return communicator_ != nullptr; }

  // Whether the device may still have work to do.
  bool busy() const { return !running_.empty(); }

  // Returns a failure of the device since the last call.
  Status Watch();

  // Waits until all ranks of the engine leave it; fails at the deadline.
  using EndBarrier = std::function<Status(Deadline)>;

  // Leaves the other ranks. With `barrier` the end is orderly: running work ends first, on all
  // ranks, or continues where that takes long. Without it the work is aborted.
  void Leave(const EndBarrier& barrier);

 private:
  struct Running {
    std::shared_ptr<const DeviceEvent> finished;
    Deadline deadline;
    std::string title;
  };

  std::shared_ptr<const Device> OpenedDevice() const;
  Result<std::unique_ptr<LaunchOrder::Turn>> AwaitTurn(const Device& device, const Waiting& waiting,
                                                       const Links& links) const;
  Status Connect(const Waiting& waiting, const Links& links);

  const std::shared_ptr<const DeviceLibraries> libraries_;
  const int rank_;
  const int size_;
  const std::string communicator_name_;

  mutable std::mutex mutex_;  // guards device_, which stays once it is set; a leaf
  std::shared_ptr<const Device> device_;

  // Used only by the thread that drives the cycle.
  bool shared_;
  std::unique_ptr<NcclCommunicator> communicator_;
  std::deque<Running> running_;  // in the order of the device's stream
};

// Why NCCL cannot run the request, as a sentence; nothing where it can. It depends only on fields
// that the ranks agree on.
std::optional<std::string> DeviceProblem(const Request& request);

}  // namespace sparkhvd
