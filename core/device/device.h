// A CUDA device as this process uses it: streams, events and memory that clean up after themselves.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/span.h"
#include "base/status.h"
#include "device/cuda.h"
#include "device/launch_order.h"

namespace sparkhvd {

class Device;

// A point in the work of a stream.
class DeviceEvent {
 public:
  DeviceEvent(std::shared_ptr<const Device> device, CudaEvent handle)
      : device_(std::move(device)), handle_(handle) {}
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  ~DeviceEvent();

  // Whether the device has reached it; a device that has failed counts as having done so.
  bool Reached() const;

  // Makes later work on `stream` wait for it; the host does not wait.
  Status LetWait(CudaStream stream) const;

 private:
  const std::shared_ptr<const Device> device_;
  const CudaEvent handle_;
};

// Memory in stream order: it is valid for later work on the device's own stream.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(std::shared_ptr<const Device> device, CudaAddress address, size_t bytes)
      : device_(std::move(device)), address_(address), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(std::move(other.device_)),
        address_(std::exchange(other.address_, 0)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();  // after what is on the device's own stream by then

  std::byte* data() const;
  size_t bytes() const { return bytes_; }

  // Copies all to `target` on `stream` and frees the memory there; a second call does nothing.
  Status MoveTo(std::byte* target, CudaStream stream);

 private:
  std::shared_ptr<const Device> device_;
  CudaAddress address_ = 0;
  size_t bytes_ = 0;
};

// May be used by any thread.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Uses the primary context, which the whole process shares. Engines that use the same device
  // share one of these, see DeviceTable.
  static Result<std::shared_ptr<const Device>> Open(std::shared_ptr<const CudaFunctions> cuda,
                                                    int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  // The device's own stream, with higher priority than those of the program.
  CudaStream stream() const { return stream_; }
  LaunchOrder& order() const { return order_; }
  const CudaFunctions& cuda() const { return *cuda_; }

  // While it lives, this thread's CUDA calls go to the device.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const CudaFunctions& cuda_;
    Status status_;
  };

  // The point at which the current work of `stream` is done.
  Result<std::unique_ptr<DeviceEvent>> Record(CudaStream stream) const;

  // `bytes` may be 0.
  Result<DeviceMemory> Allocate(size_t bytes) const;
  Result<DeviceMemory> Upload(ConstBytes content) const;

 private:
  friend class DeviceEvent;
  Device(std::shared_ptr<const CudaFunctions> cuda, int ordinal)
      : cuda_(std::move(cuda)), ordinal_(ordinal) {}
  Status Initialize();
  Result<CudaEvent> TakeEvent() const;  // with the device's context
  void GiveBack(CudaEvent event) const;

  const std::shared_ptr<const CudaFunctions> cuda_;
  const int ordinal_;
  int handle_ = 0;
  CudaContext context_ = nullptr;
  CudaStream stream_ = nullptr;
  CudaPool pool_ = nullptr;
  mutable LaunchOrder order_;

  mutable std::mutex mutex_;  // guards what follows; a leaf
  // An event may be recorded anew while streams still wait for its previous point: they keep
  // waiting for that one.
  mutable std::vector<CudaEvent> free_events_;
};

// The devices that engines of this process use, one of each; thread-safe.
class DeviceTable {
 public:
  Result<std::shared_ptr<const Device>> Open(const std::shared_ptr<const CudaFunctions>& cuda,
                                             int ordinal);

 private:
  std::mutex mutex_;  // guards devices_
  std::map<int, std::weak_ptr<const Device>> devices_;
};

}  // namespace sparkhvd
