// Waits for a condition variable without a deadline.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>

namespace sparkhvd {

// Like std::condition_variable::wait, which may also return without a notification. Compiled by GCC
// 12, that function needs the libstdc++ of GCC 12; RHEL 9 and Amazon Linux 2023 have that of
// GCC 11.
inline void AwaitNotification(std::condition_variable& condition,
                              std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

}  // namespace sparkhvd
