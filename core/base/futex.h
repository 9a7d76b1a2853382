// Waits for words in memory that several processes have mapped.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace sparkhvd {

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free &&
                  sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "atomics in memory shared by processes must be plain words");

// Not FUTEX_PRIVATE, because the waiters are in other processes.
inline void FutexWait(std::atomic<uint32_t>& word, uint32_t expected,
                      std::chrono::nanoseconds timeout) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000);
  time.tv_nsec = static_cast<decltype(time.tv_nsec)>(timeout.count() % 1'000'000'000);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &time, nullptr, 0);
}

inline void FutexWakeAll(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
            0);
}

}  // namespace sparkhvd
