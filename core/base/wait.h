// A wait for a condition variable, without a deadline.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>

namespace sparkhvd {

// Replaces std::condition_variable::wait. GCC 12 compiles a call of that function to a symbol that
// libstdc++ has only since GCC 12, but RHEL 9 and Amazon Linux 2023 ship the libstdc++ of GCC 11.
// Spurious wakeups are possible, as with the original.
inline void AwaitNotification(std::condition_variable& condition,
                              std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

}  // namespace sparkhvd
