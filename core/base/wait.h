// Waits for a condition variable without a deadline.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>

namespace sparkhvd {

// Like std::condition_variable::wait, it may return without a notification. Code that GCC 12
// compiles can call std::condition_variable::wait only with the libstdc++ of GCC 12. RHEL 9 and
// Amazon Linux 2023 have the libstdc++ of GCC 11.
inline void AwaitNotification(std::condition_variable& condition,
                              std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

}  // namespace sparkhvd
