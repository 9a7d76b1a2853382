// The simulated devices and streams.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "simulated_device/control.h"

namespace simulated {

// Counts a call. Returns the result that FailNext has set, 0 by default.
int CountCall(const char* function);

// The shared state of the simulation. The mutex also guards all state whose comment names the
// shared mutex.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<bool, kDevices> held{};  // see Hold
};
Shared& TheShared();

// Records a misuse for TakeMisuses. Thread-safe.
void RecordMisuse(const std::string& what);

// The live handles of one kind.
class Handles {
 public:
  explicit Handles(const char* kind) : kind_(kind) {}
  void Add(const void* handle);
  void Remove(const void* handle);  // records a misuse if the handle is not alive
  bool Alive(const void* handle, const char* call);
  size_t count();

 private:
  const char* const kind_;
  std::mutex mutex_;
  std::set<const void*> alive_;
};

}  // namespace simulated

struct CUctx_st {
  std::atomic<int> ordinal{0};
};

// Runs its tasks one after the other, on a thread of its own.
struct CUstream_st {
 public:
  explicit CUstream_st(int device) : ordinal(device), thread_([this] { Main(); }) {}
  ~CUstream_st();  // waits for its tasks
  void Put(std::function<void()> task);
  void AwaitEmpty();

  const int ordinal;

 private:
  void Main();

  std::deque<std::function<void()>> tasks_;  // guarded by the shared mutex, like busy_ and closed_
  bool busy_ = false;
  bool closed_ = false;
  std::thread thread_;
};

// Returns the device of this thread's current context, or -1 without one.
int CurrentDevice();
