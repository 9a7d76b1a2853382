// What belongs to one operation in the memory of a device, beside its buffers.
#pragma once

#include <memory>
#include <utility>

#include "base/status.h"
#include "device/device.h"

namespace sparkhvd {

// Where the program's work for an operation stands: its results are used, and its sources come
// from, what is on this stream.
struct DeviceStream {
  int ordinal = 0;
  CudaStream stream = nullptr;

  bool operator==(const DeviceStream& other) const {
    return ordinal == other.ordinal && stream == other.stream;
  }
};

// The engine fills it in; once the operation is done it does not change, but for its output.
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

  // The rest once the operation is done.

  // Whether the device has carried it out, too.
  bool Finished() const { return !finished_ || finished_->Reached(); }

  // Lets what is put on `stream` from now on see the result.
  Status LetWait(CudaStream stream) const {
    return finished_ ? finished_->LetWait(stream) : Status();
  }

  // Copies what came from all ranks to `target` in the order of `stream`. Once.
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
