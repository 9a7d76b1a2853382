#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "simulated_device/device.h"

namespace simulated {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kNotReady = 600;

struct Script {
  std::mutex mutex;
  std::map<std::string, int> calls;
  std::map<std::string, int> failures;
  std::vector<std::string> misuses;
};

Script& TheScript() {
  static Script script;
  return script;
}

Handles& TheEvents() {
  static Handles events("an event");
  return events;
}

Handles& TheStreams() {
  static Handles streams("a stream");
  return streams;
}

Handles& ThePools() {
  static Handles pools("a memory pool");
  return pools;
}

std::atomic<size_t> allocations{0};
std::array<CUctx_st, kDevices> contexts;

std::vector<CUctx_st*>& Stack() {
  thread_local std::vector<CUctx_st*> stack;
  return stack;
}

// Like `CountCall`, for functions that need a current context.
int CountCallInContext(const char* function) {
  const int result = CountCall(function);
  if (result != 0) return result;
  return CurrentDevice() < 0 ? kInvalidContext : 0;
}

}  // namespace

int CountCall(const char* function) {
  Script& script = TheScript();
  const std::lock_guard<std::mutex> lock(script.mutex);
  ++script.calls[function];
  const auto failure = script.failures.find(function);
  if (failure == script.failures.end()) return 0;
  const int result = failure->second;
  script.failures.erase(failure);
  return result;
}

Shared& TheShared() {
  static Shared shared;
  return shared;
}

CUstream_st* NewStream(int ordinal) {
  auto* stream = new CUstream_st(ordinal);
  TheStreams().Add(stream);
  return stream;
}

void DeleteStream(CUstream_st* stream) {
  TheStreams().Remove(stream);
  delete stream;
}

void AwaitStream(CUstream_st* stream) { stream->AwaitEmpty(); }

void Hold(int ordinal) {
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  TheShared().held[static_cast<size_t>(ordinal)] = true;
}

void Release(int ordinal) {
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    TheShared().held[static_cast<size_t>(ordinal)] = false;
  }
  TheShared().changed.notify_all();
}

void FailNext(const char* function, int result) {
  const std::lock_guard<std::mutex> lock(TheScript().mutex);
  TheScript().failures[function] = result;
}

int Calls(const char* function) {
  const std::lock_guard<std::mutex> lock(TheScript().mutex);
  return TheScript().calls[function];
}

size_t Allocations() { return allocations; }
size_t Events() { return TheEvents().count(); }

std::vector<std::string> TakeMisuses() {
  const std::lock_guard<std::mutex> lock(TheScript().mutex);
  return std::exchange(TheScript().misuses, {});
}

void RecordMisuse(const std::string& what) {
  const std::lock_guard<std::mutex> lock(TheScript().mutex);
  TheScript().misuses.push_back(what);
}

void Handles::Add(const void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  alive_.insert(handle);
}

void Handles::Remove(const void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (alive_.erase(handle) == 0) RecordMisuse(std::string(kind_) + " was ended twice");
}

bool Handles::Alive(const void* handle, const char* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (alive_.count(handle) > 0) return true;
  RecordMisuse(std::string(call) + ": " + kind_ + " was used after its end");
  return false;
}

size_t Handles::count() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return alive_.size();
}

}  // namespace simulated

using simulated::CountCall;
using simulated::CountCallInContext;
using simulated::TheShared;

int CurrentDevice() {
  return simulated::Stack().empty() ? -1 : simulated::Stack().back()->ordinal.load();
}

CUstream_st::~CUstream_st() {
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    closed_ = true;
  }
  TheShared().changed.notify_all();
  thread_.join();
}

void CUstream_st::Put(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    tasks_.push_back(std::move(task));
  }
  TheShared().changed.notify_all();
}

void CUstream_st::AwaitEmpty() {
  std::unique_lock<std::mutex> lock(TheShared().mutex);
  TheShared().changed.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

void CUstream_st::Main() {
  const auto device = static_cast<size_t>(ordinal);
  std::unique_lock<std::mutex> lock(TheShared().mutex);
  while (true) {
    TheShared().changed.wait(lock, [&] {
      return (!tasks_.empty() && !TheShared().held[device]) || (tasks_.empty() && closed_);
    });
    if (tasks_.empty()) return;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    lock.lock();
    busy_ = false;
    TheShared().changed.notify_all();
  }
}

namespace {

// Counts how often the event was recorded and how many of these points were reached. Guarded by the
// shared mutex.
struct EventState {
  uint64_t recorded = 0;
  uint64_t reached = 0;
};

}  // namespace

struct CUevent_st {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

namespace {

constexpr int kHighestPriority = -5;
constexpr int kInvalidHandle = 400;

// Like `CountCallInContext`, for functions that use an event, a stream or both.
int CalledWith(const char* function, const CUevent_st* event, const CUstream_st* stream) {
  const int result = CountCallInContext(function);
  if (result != 0) return result;
  const bool alive = (event == nullptr || simulated::TheEvents().Alive(event, function)) &&
                     (stream == nullptr || simulated::TheStreams().Alive(stream, function));
  return alive ? 0 : kInvalidHandle;
}

}  // namespace

struct CUmemPoolHandle_st {
  int device = 0;
};

extern "C" {

SIMULATED_EXPORT int cuInit(unsigned) { return CountCall("cuInit"); }

SIMULATED_EXPORT int cuGetErrorString(int, const char** text) {
  *text = "simulated failure";
  return 0;
}

SIMULATED_EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= simulated::kDevices) return simulated::kInvalidDevice;
  *device = ordinal;
  return CountCall("cuDeviceGet");
}

SIMULATED_EXPORT int cuDevicePrimaryCtxRetain(CUctx_st** context, int device) {
  *context = &simulated::contexts[static_cast<size_t>(device)];
  (*context)->ordinal = device;
  return CountCall("cuDevicePrimaryCtxRetain");
}

SIMULATED_EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
  return CountCall("cuDevicePrimaryCtxRelease");
}

SIMULATED_EXPORT int cuCtxPushCurrent_v2(CUctx_st* context) {
  simulated::Stack().push_back(context);
  return CountCall("cuCtxPushCurrent");
}

SIMULATED_EXPORT int cuCtxPopCurrent_v2(CUctx_st** context) {
  if (simulated::Stack().empty()) return simulated::kInvalidContext;
  *context = simulated::Stack().back();
  simulated::Stack().pop_back();
  return CountCall("cuCtxPopCurrent");
}

SIMULATED_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = kHighestPriority;
  return CountCallInContext("cuCtxGetStreamPriorityRange");
}

SIMULATED_EXPORT int cuStreamCreateWithPriority(CUstream_st** stream, unsigned, int priority) {
  const int result = CountCallInContext("cuStreamCreateWithPriority");
  if (result != 0) return result;
  if (priority != kHighestPriority) {
    simulated::RecordMisuse("a stream without the highest priority");
  }
  *stream = simulated::NewStream(CurrentDevice());
  return 0;
}

SIMULATED_EXPORT int cuStreamDestroy_v2(CUstream_st* stream) {
  simulated::DeleteStream(stream);
  return CountCallInContext("cuStreamDestroy");
}

SIMULATED_EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  const int result = CountCallInContext("cuEventCreate");
  if (result != 0) return result;
  *event = new CUevent_st();
  simulated::TheEvents().Add(*event);
  return 0;
}

SIMULATED_EXPORT int cuEventDestroy_v2(CUevent_st* event) {
  simulated::TheEvents().Remove(event);
  delete event;
  return CountCallInContext("cuEventDestroy");
}

SIMULATED_EXPORT int cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  const int result = CalledWith("cuEventRecord", event, stream);
  if (result != 0) return result;
  if (stream->ordinal != CurrentDevice()) return simulated::kInvalidValue;
  uint64_t point = 0;
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    point = ++event->state->recorded;
  }
  stream->Put([state = event->state, point] {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    state->reached = point;
  });
  return 0;
}

SIMULATED_EXPORT int cuEventQuery(CUevent_st* event) {
  const int result = CalledWith("cuEventQuery", event, nullptr);
  if (result != 0) return result;
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  return event->state->reached == event->state->recorded ? 0 : simulated::kNotReady;
}

SIMULATED_EXPORT int cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  const int result = CalledWith("cuStreamWaitEvent", event, stream);
  if (result != 0) return result;
  uint64_t point = 0;
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    point = event->state->recorded;
  }
  stream->Put([state = event->state, point] {
    std::unique_lock<std::mutex> lock(TheShared().mutex);
    TheShared().changed.wait(lock, [&] { return state->reached >= point; });
  });
  return 0;
}

// The beginning of CUmemPoolProps.
struct PoolProperties {
  int allocation_type;
  int handle_types;
  int location_type;
  int device;
};

SIMULATED_EXPORT int cuMemPoolCreate(CUmemPoolHandle_st** pool, const PoolProperties* properties) {
  const int result = CountCallInContext("cuMemPoolCreate");
  if (result != 0) return result;
  if (properties->allocation_type != 1 || properties->location_type != 1) {
    return simulated::kInvalidValue;
  }
  *pool = new CUmemPoolHandle_st{properties->device};
  simulated::ThePools().Add(*pool);
  return 0;
}

SIMULATED_EXPORT int cuMemPoolDestroy(CUmemPoolHandle_st* pool) {
  simulated::ThePools().Remove(pool);
  delete pool;
  return CountCallInContext("cuMemPoolDestroy");
}

SIMULATED_EXPORT int cuMemPoolSetAttribute(CUmemPoolHandle_st* pool, int, void*) {
  simulated::ThePools().Alive(pool, "cuMemPoolSetAttribute");
  return CountCallInContext("cuMemPoolSetAttribute");
}

SIMULATED_EXPORT int cuMemAllocFromPoolAsync(unsigned long long* address, size_t bytes,
                                             CUmemPoolHandle_st* pool, CUstream_st* stream) {
  const int result = CalledWith("cuMemAllocFromPoolAsync", nullptr, stream);
  if (result != 0) return result;
  if (!simulated::ThePools().Alive(pool, "cuMemAllocFromPoolAsync")) return kInvalidHandle;
  if (pool->device != CurrentDevice()) return simulated::kInvalidDevice;
  void* memory = std::malloc(bytes);
  if (bytes == 0 || memory == nullptr) return simulated::kOutOfMemory;
  ++simulated::allocations;
  *address = reinterpret_cast<unsigned long long>(memory);
  return 0;
}

SIMULATED_EXPORT int cuMemFreeAsync(unsigned long long address, CUstream_st* stream) {
  if (const int result = CalledWith("cuMemFreeAsync", nullptr, stream)) return result;
  stream->Put([address] {
    std::free(reinterpret_cast<void*>(address));
    --simulated::allocations;
  });
  return 0;
}

SIMULATED_EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source,
                                          size_t bytes, CUstream_st* stream) {
  const int result = CountCallInContext("cuMemcpyDtoDAsync");
  if (result != 0) return result;
  stream->Put([=] {
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
  });
  return 0;
}

SIMULATED_EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source,
                                          size_t bytes, CUstream_st* stream) {
  const int result = CountCallInContext("cuMemcpyHtoDAsync");
  if (result != 0) return result;
  // The driver reads unpinned memory before the call returns.
  const auto* begin = static_cast<const char*>(source);
  stream->Put([target, content = std::vector<char>(begin, begin + bytes)] {
    std::memcpy(reinterpret_cast<void*>(target), content.data(), content.size());
  });
  return 0;
}

}  // extern "C"
