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
// device goes on alone, and Watch() looks after it.
class DeviceExecution {
 public:
  // `libraries` may be null: then there is no device.
  DeviceExecution(std::shared_ptr<const DeviceLibraries> libraries, int rank, int size)
      : libraries_(std::move(libraries)), rank_(rank), size_(size) {}

  // By any thread.

  // What belongs to an operation on memory that what is on `submitter` by now makes ready.
  Result<std::unique_ptr<DeviceWork>> Begin(const DeviceStream& submitter);

  // By the thread that steers the engine.

  // Gives all ranks the bytes of rank 0.
  using Share = std::function<Status(Bytes)>;

  // Runs operations of one kind together. What takes longer than until the deadline has failed.
  Status Run(const std::vector<const Ready*>& group, const Waiting& waiting, const Share& share);

  // Whether NCCL connects the ranks, which it does from the first Run on.
  bool connected() const { return communicator_ != nullptr; }

  // Whether the device may not have carried out everything yet.
  bool busy() const { return !running_.empty(); }

  // What has gone wrong on the device since.
  Status Watch();

  // Leaves the other ranks: with `orderly` what runs may end first, for a while.
  void Leave(bool orderly);

 private:
  struct Running {
    std::shared_ptr<const DeviceEvent> finished;
    Deadline deadline;
    std::string title;
  };

  std::shared_ptr<const Device> OpenedDevice() const;
  Status Connect(const Waiting& waiting, const Share& share);

  const std::shared_ptr<const DeviceLibraries> libraries_;
  const int rank_;
  const int size_;

  mutable std::mutex mutex_;  // guards device_, which stays once it is set; a leaf
  std::shared_ptr<const Device> device_;

  // Of the thread that steers.
  std::unique_ptr<NcclCommunicator> communicator_;
  std::deque<Running> running_;  // in the order of the device's stream
};

// Why NCCL cannot do what is asked for, as a sentence; nothing where it can. Only what ranks agree
// on counts.
std::optional<std::string> DeviceProblem(const Request& request);

}  // namespace sparkhvd
