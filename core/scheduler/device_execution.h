// Runs operations in the memory of CUDA devices with NCCL.
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

// The device of one rank is the first device on which the rank submits an operation. An operation
// is done here once its work is on a stream of the device, after the work that the submitter had
// put on its own stream. The device then continues alone, and Watch() checks it.
class DeviceExecution {
 public:
  // `libraries` may be null, which means that there is no device. `communicator` is equal on all
  // ranks and distinguishes this communicator from others of the process. `shared` starts in the
  // state that ShareDevice() sets.
  DeviceExecution(std::shared_ptr<const DeviceLibraries> libraries, int rank, int size,
                  std::string communicator, bool shared)
      : libraries_(std::move(libraries)),
        rank_(rank),
        size_(size),
        communicator_name_(std::move(communicator)),
        shared_(shared) {}

  // The following functions may be called by any thread.

  // Returns the point at which the current work of `submitter` is done and its memory is ready.
  Result<std::shared_ptr<const DeviceEvent>> Mark(const DeviceStream& submitter);

  // Only the thread that drives the cycle may call the following functions.

  // The exchanges that ranks make over the host links before they start on their devices.
  struct Links {
    std::function<Status(Bytes)> share;       // sends the bytes of rank 0 to all ranks
    std::function<Status(int64_t*)> highest;  // gives all ranks the highest number of any rank
    // Sends every rank the number of rows for it. Returns the numbers of rows for this rank, by
    // sender.
    std::function<Result<std::vector<int64_t>>(const std::vector<int64_t>&)> exchange;
  };

  // Runs operations of one kind together. Operations that are not done by the deadline fail.
  Status Run(const std::vector<const ReadyOperation*>& group, const Waiting& waiting,
             const Links& links);

  // Makes later collectives follow a LaunchOrder, because other communicators now use the devices,
  // too. All ranks call it between the same two collectives.
  void ShareDevice() { shared_ = true; }

  // Returns whether NCCL connects the ranks. The first Run makes the connection.
  bool connected() const { return communicator_ != nullptr; }

  // Returns whether the device may still have work.
  bool busy() const { return !running_.empty(); }

  // Returns a failure of the device since the last call.
  Status Watch();

  // Waits until all ranks of the engine leave. Fails at the deadline.
  using EndBarrier = std::function<Status(Deadline)>;

  // Leaves the other ranks. With `barrier`, the end is orderly: running work ends first on all
  // ranks, or continues if that takes long. Without `barrier`, the work is aborted.
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

  mutable std::mutex mutex_;  // guards device_, which is set once; innermost in the lock order
  std::shared_ptr<const Device> device_;

  // Only the thread that drives the cycle uses the fields below.
  bool shared_;
  std::unique_ptr<NcclCommunicator> communicator_;
  std::deque<Running> running_;  // in the order of the device's stream
};

// Returns the reason why NCCL cannot run the request, as a sentence, or nothing if it can. The
// result depends only on fields that the ranks agree on.
std::optional<std::string> DeviceProblem(const Request& request);

}  // namespace sparkhvd
