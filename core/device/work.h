// The state of one operation in the memory of a device, beside its buffers.
#pragma once

#include <memory>
#include <utility>

#include "base/status.h"
#include "device/device.h"

namespace sparkhvd {

// The stream of the program's work for an operation, which makes its sources and uses its results.
struct DeviceStream {
  int ordinal = 0;
  CudaStream stream = nullptr;

  bool operator==(const DeviceStream& other) const {
    return ordinal == other.ordinal && stream == other.stream;
  }
};

// The engine fills it in; once the operation is done only its output changes.
class DeviceWork {
 public:
  explicit DeviceWork(std::shared_ptr<const DeviceEvent> submitted)
      : submitted_(std::move(submitted)) {}

  // The buffers are ready at this point.
  const DeviceEvent& submitted() const { return *submitted_; }

  void SetFinished(std::shared_ptr<const DeviceEvent> finished, DeviceMemory output) {
    finished_ = std::move(finished);
    output_ = std::move(output);
  }

  // For use once the operation is done.

  // Whether the device has completed it, too.
  bool Finished() const { return !finished_ || finished_->Reached(); }

  // Makes later work on `stream` see the result.
  Status LetWait(CudaStream stream) const {
    return finished_ ? finished_->LetWait(stream) : Status();
  }

  // Copies the data from all ranks to `target` in the order of `stream`. Works once.
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
