// A CUDA device of this process: streams, events and memory that clean up after themselves.
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

  // Returns whether the device has reached the event. A failed device counts as having reached it.
  bool Reached() const;

  // Makes later work on `stream` wait for the event. The host does not wait.
  Status LetWait(CudaStream stream) const;

 private:
  const std::shared_ptr<const Device> device_;
  const CudaEvent handle_;
};

// Memory in stream order: valid for later work on the device's own stream.
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
  ~DeviceMemory();  // frees after the current work of the device's own stream

  std::byte* data() const;
  size_t bytes() const { return bytes_; }

  // Copies all bytes to `target` on `stream` and frees the memory there. A second call does
  // nothing.
  Status MoveTo(std::byte* target, CudaStream stream);

 private:
  std::shared_ptr<const Device> device_;
  CudaAddress address_ = 0;
  size_t bytes_ = 0;
};

// A CUDA device with its own stream and memory pool. Any thread may use it.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Uses the primary context, which the whole process shares. Engines that use the same device
  // share one Device; see DeviceTable.
  static Result<std::shared_ptr<const Device>> Open(std::shared_ptr<const CudaFunctions> cuda,
                                                    int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  // Returns the device's own stream. Its priority is higher than that of the program's streams.
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

  // Returns the point at which the current work of `stream` is done.
  Result<std::unique_ptr<DeviceEvent>> Record(CudaStream stream) const;

  // `bytes` may be 0.
  Result<DeviceMemory> Allocate(size_t bytes) const;
  Result<DeviceMemory> Upload(ConstBytes content) const;

 private:
  friend class DeviceEvent;
  Device(std::shared_ptr<const CudaFunctions> cuda, int ordinal)
      : cuda_(std::move(cuda)), ordinal_(ordinal) {}
  Status Initialize();
  Result<CudaEvent> TakeEvent() const;  // requires the device's context
  void RecycleEvent(CudaEvent event) const;

  const std::shared_ptr<const CudaFunctions> cuda_;
  const int ordinal_;
  int handle_ = 0;
  CudaContext context_ = nullptr;
  CudaStream stream_ = nullptr;
  CudaPool pool_ = nullptr;
  mutable LaunchOrder order_;

  mutable std::mutex mutex_;  // guards the fields below; innermost in the lock order
  // An event may be recorded again while streams still wait for its previous point. These streams
  // continue to wait for the previous point.
  mutable std::vector<CudaEvent> free_events_;
};

// The devices that the engines of this process use, one Device for each. Thread-safe.
class DeviceTable {
 public:
  Result<std::shared_ptr<const Device>> Open(const std::shared_ptr<const CudaFunctions>& cuda,
                                             int ordinal);

 private:
  std::mutex mutex_;  // guards devices_
  std::map<int, std::weak_ptr<const Device>> devices_;
};

}  // namespace sparkhvd
