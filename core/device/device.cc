#include "device/device.h"

#include <string>

namespace sparkhvd {
namespace {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING
// The free memory that the pool keeps. Without this threshold, every synchronization of the device
// would return all free memory to the driver.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;
constexpr unsigned kBesideTheOthers =
    1;  // CU_STREAM_NON_BLOCKING: no order with the default stream

CudaAddress AddressOf(const std::byte* data) { return reinterpret_cast<CudaAddress>(data); }

}  // namespace

// Destructors ignore failures, because the process, and with it the driver, may be ending.

DeviceEvent::~DeviceEvent() { device_->RecycleEvent(handle_); }

bool DeviceEvent::Reached() const {
  const Device::Current current(*device_);
  return !current.status().ok() || device_->cuda().event_query(handle_) != kCudaNotReady;
}

Status DeviceEvent::LetWait(CudaStream stream) const {
  const Device::Current current(*device_);
  SHVD_TRY(current.status());
  const CudaFunctions& cuda = device_->cuda();
  return cuda.Check("cuStreamWaitEvent", cuda.stream_wait_event(stream, handle_, 0));
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  const Device::Current current(*device_);
  if (current.status().ok()) device_->cuda().memory_free(address_, device_->stream());
}

std::byte* DeviceMemory::data() const {
  return reinterpret_cast<std::byte*>(address_);  // NOLINT: the driver's addresses are pointers
}

Status DeviceMemory::MoveTo(std::byte* target, CudaStream stream) {
  if (address_ == 0) return Status();
  const Device::Current current(*device_);
  SHVD_TRY(current.status());
  const CudaFunctions& cuda = device_->cuda();
  SHVD_TRY(cuda.Check("cuMemcpyDtoDAsync",
                      cuda.copy_on_device(AddressOf(target), address_, bytes_, stream)));
  return cuda.Check("cuMemFreeAsync", cuda.memory_free(std::exchange(address_, 0), stream));
}

Device::Current::Current(const Device& device)
    : cuda_(device.cuda()),
      status_(cuda_.Check("cuCtxPushCurrent", cuda_.context_push(device.context_))) {}

Device::Current::~Current() {
  CudaContext ours = nullptr;
  if (status_.ok()) cuda_.context_pop(&ours);
}

Result<std::shared_ptr<const Device>> Device::Open(std::shared_ptr<const CudaFunctions> cuda,
                                                   int ordinal) {
  const std::shared_ptr<Device> device(new Device(std::move(cuda), ordinal));
  SHVD_TRY(device->Initialize().Annotate("CUDA device " + std::to_string(ordinal)));
  return std::shared_ptr<const Device>(device);
}

Result<std::shared_ptr<const Device>> DeviceTable::Open(
    const std::shared_ptr<const CudaFunctions>& cuda, int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<const Device>& known = devices_[ordinal];
  if (std::shared_ptr<const Device> device = known.lock()) return device;
  Result<std::shared_ptr<const Device>> opened = Device::Open(cuda, ordinal);
  SHVD_TRY(opened.status());
  known = opened.value();
  return opened;
}

Status Device::Initialize() {
  SHVD_TRY(cuda_->Check("cuDeviceGet", cuda_->device_get(&handle_, ordinal_)));
  SHVD_TRY(
      cuda_->Check("cuDevicePrimaryCtxRetain", cuda_->primary_context_retain(&context_, handle_)));
  const Current current(*this);
  SHVD_TRY(current.status());
  int lowest = 0;
  int highest = 0;  // lower numbers are higher priorities
  SHVD_TRY(cuda_->Check("cuCtxGetStreamPriorityRange", cuda_->priority_range(&lowest, &highest)));
  SHVD_TRY(cuda_->Check("cuStreamCreateWithPriority",
                        cuda_->stream_create(&stream_, kBesideTheOthers, highest)));
  CudaPoolProperties properties;
  properties.device = handle_;
  SHVD_TRY(cuda_->Check("cuMemPoolCreate", cuda_->pool_create(&pool_, &properties)));
  uint64_t kept = kKeptBytes;
  return cuda_->Check("cuMemPoolSetAttribute",
                      cuda_->pool_set_attribute(pool_, kCudaReleaseThreshold, &kept));
}

Device::~Device() {
  if (context_ != nullptr) {
    const Current current(*this);
    if (current.status().ok()) {
      for (const CudaEvent event : free_events_) cuda_->event_destroy(event);
      if (stream_ != nullptr) cuda_->stream_destroy(stream_);
      if (pool_ != nullptr) cuda_->pool_destroy(pool_);
    }
  }
  if (context_ != nullptr) cuda_->primary_context_release(handle_);
}

Result<std::unique_ptr<DeviceEvent>> Device::Record(CudaStream stream) const {
  const Current current(*this);
  SHVD_TRY(current.status());
  const Result<CudaEvent> handle = TakeEvent();
  SHVD_TRY(handle.status());
  auto event = std::make_unique<DeviceEvent>(shared_from_this(), handle.value());
  SHVD_TRY(cuda_->Check("cuEventRecord", cuda_->event_record(handle.value(), stream)));
  return event;
}

Result<CudaEvent> Device::TakeEvent() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_events_.empty()) {
      const CudaEvent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  CudaEvent event = nullptr;
  SHVD_TRY(cuda_->Check("cuEventCreate", cuda_->event_create(&event, kNoTiming)));
  return event;
}

void Device::RecycleEvent(CudaEvent event) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_events_.push_back(event);
}

Result<DeviceMemory> Device::Allocate(size_t bytes) const {
  if (bytes == 0) return DeviceMemory();
  const Current current(*this);
  SHVD_TRY(current.status());
  CudaAddress address = 0;
  SHVD_TRY(cuda_
               ->Check("cuMemAllocFromPoolAsync",
                       cuda_->memory_allocate(&address, bytes, pool_, stream_))
               .Annotate("cannot allocate " + std::to_string(bytes) + " bytes on CUDA device " +
                         std::to_string(ordinal_)));
  return DeviceMemory(shared_from_this(), address, bytes);
}

Result<DeviceMemory> Device::Upload(ConstBytes content) const {
  Result<DeviceMemory> memory = Allocate(content.size());
  if (!memory.ok() || content.empty()) return memory;
  const Current current(*this);
  SHVD_TRY(current.status());
  SHVD_TRY(cuda_->Check("cuMemcpyHtoDAsync",
                        cuda_->copy_to_device(AddressOf(memory.value().data()), content.data(),
                                              content.size(), stream_)));
  return memory;
}

}  // namespace sparkhvd
