// The state of one operation in the memory of a device, besides its buffers.
#pragma once

#include <memory>
#include <utility>

#include "base/status.h"
#include "device/device.h"

namespace sparkhvd {

// The program's stream for an operation: it produces the sources and uses the results.
struct DeviceStream {
  int ordinal = 0;
  CudaStream stream = nullptr;

  bool operator==(const DeviceStream& other) const {
    return ordinal == other.ordinal && stream == other.stream;
  }
};

// The engine sets the fields. Once the operation is done, only the output changes.
class DeviceWork {
 public:
  explicit DeviceWork(std::shared_ptr<const DeviceEvent> submitted)
      : submitted_(std::move(submitted)) {}

  // Returns the point at which the buffers are ready.
  const DeviceEvent& submitted() const { return *submitted_; }

  void SetFinished(std::shared_ptr<const DeviceEvent> finished, DeviceMemory output) {
    finished_ = std::move(finished);
    output_ = std::move(output);
  }

  // The following functions are valid once the operation is done.

  // Returns whether the device has completed the operation, too.
  bool Finished() const { return !finished_ || finished_->Reached(); }

  // Makes later work on `stream` see the result.
  Status LetWait(CudaStream stream) const {
    return finished_ ? finished_->LetWait(stream) : Status();
  }

  // Copies the data of all ranks to `target` in the order of `stream`. Works once.
  Status MoveOutput(std::byte* target, CudaStream stream) {
    SHVD_TRY(LetWait(stream));
    return output_.MoveTo(target, stream);
  }

 private:
  const std::shared_ptr<const DeviceEvent> submitted_;
  std::shared_ptr<const DeviceEvent> finished_;
  DeviceMemory output_;
};

}  // namespace sparkhvd
