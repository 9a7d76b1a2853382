// How long a thread spins before it sleeps.
#pragma once

#include <atomic>
#include <chrono>

namespace sparkhvd {

// A thread that works beside the program spins for a moment only, because the program may need its
// core.
inline constexpr std::chrono::microseconds kShortSpin(5);
// A thread of the program that has nothing else to do spins for about as long as a wake-up takes on
// a virtual machine. Even if it then sleeps, it has waited at most twice as long as necessary.
inline constexpr std::chrono::microseconds kLongSpin(50);

// This thread spins long for the lifetime of this object.
class SpinsLong {
 public:
  SpinsLong() : before_(spin_time_) { spin_time_ = kLongSpin; }
  ~SpinsLong() { spin_time_ = before_; }
  SpinsLong(const SpinsLong&) = delete;
  SpinsLong& operator=(const SpinsLong&) = delete;

  // Returns how long this thread spins.
  static std::chrono::microseconds Time() { return spin_time_; }

 private:
  static inline thread_local std::chrono::microseconds spin_time_ = kShortSpin;

  const std::chrono::microseconds before_;
};

// Lets a spinning thread wait for a moment.
inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // takes about as long as the pause of x86; `yield` takes no time
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace sparkhvd
