// Releases and acquires the GIL in threads that may outlive the interpreter.
//
// Up to Python 3.13, Python calls pthread_exit in a thread that requests the GIL while the
// interpreter shuts down. pthread_exit unwinds the stack, and unwinding out of a destructor aborts
// the process. These classes block such a thread until the process ends, as Python 3.14 does.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace sparkhvd::bindings {

template <typename Acquire>
auto AcquireOrBlockForever(const Acquire& acquire) noexcept {
  try {
    return acquire();
  } catch (...) {
    while (true) pause();
  }
}

// Releases the GIL for the lifetime of this object, so that other threads can run Python.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    AcquireOrBlockForever([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL for the lifetime of this object, so that this thread can call Python.
class GilAcquire {
 public:
  GilAcquire() : state_(AcquireOrBlockForever([] { return PyGILState_Ensure(); })) {}
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace sparkhvd::bindings
