// Releases and acquires the GIL in threads that may outlive the interpreter.
//
// Up to Python 3.13, a thread that asks for the GIL while the interpreter ends is itself ended by
// pthread_exit. Unwinding must not pass a destructor, so the process would abort. These classes
// block such a thread instead, as Python 3.14 does, until the process ends.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace sparkhvd::bindings {

template <typename TakeLock>
auto TakeLockOrStay(const TakeLock& take_lock) noexcept {
  try {
    return take_lock();
  } catch (...) {
    while (true) pause();
  }
}

// Lets other threads run Python while it lives.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    TakeLockOrStay([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Lets this thread call Python while it lives.
class GilAcquire {
 public:
  GilAcquire() : state_(TakeLockOrStay([] { return PyGILState_Ensure(); })) {}
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace sparkhvd::bindings
