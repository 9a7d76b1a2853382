// Inside the simulation: its devices and streams.
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

// Counts a call; the result that it was told to have, 0 by default.
int Called(const char* function);

// Guards whether devices are held, and everything else of the simulation that is shared.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<bool, kDevices> held{};
};
Shared& TheShared();

// Notes a misuse; any thread.
void Misused(const std::string& what);

// The handles of one kind that are alive.
class Handles {
 public:
  explicit Handles(const char* kind) : kind_(kind) {}
  void Add(const void* handle);
  void Remove(const void* handle);  // a misuse where it is not alive
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

// Does what is put on it one after the other.
struct CUstream_st {
 public:
  explicit CUstream_st(int device) : ordinal(device), thread_([this] { Main(); }) {}
  ~CUstream_st();  // after what is on it
  void Put(std::function<void()> task);
  void AwaitEmpty();

  const int ordinal;

 private:
  void Main();

  std::deque<std::function<void()>> tasks_;  // guarded by the shared mutex, the next one too
  bool busy_ = false;
  bool closed_ = false;
  std::thread thread_;
};

// The device of the context that is current in this thread; -1 without one.
int CurrentDevice();
