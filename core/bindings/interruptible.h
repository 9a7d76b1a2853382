// Waits that Ctrl-C can end.
#pragma once

#include <pybind11/pybind11.h>

#include "base/deadline.h"
#include "base/status.h"
#include "bindings/gil.h"

namespace sparkhvd::bindings {

// For waits without the GIL that poll for interruptions. Returns kAborted if a signal handler
// raised; ThrowIfInterrupted() then throws that exception.
inline Status CheckSignals() {
  const GilAcquire acquire;
  if (PyErr_Occurred() == nullptr && PyErr_CheckSignals() == 0) return Status();
  return Status(StatusCode::kAborted, "interrupted");
}

// Requires the GIL. Call it once such a wait has ended.
inline void ThrowIfInterrupted() {
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
}

// Python's main thread, the only one that runs signal handlers. Making this object requires the
// GIL.
class MainThread {
 public:
  MainThread()
      : ident_(pybind11::module_::import("threading")
                   .attr("main_thread")()
                   .attr("ident")
                   .cast<unsigned long>()) {}

  // Does not require the GIL.
  bool IsThisThread() const { return PyThread_get_thread_ident() == ident_; }

 private:
  unsigned long ident_;
};

// Calls `wait(deadline)` without the GIL until it returns a status other than kTimeout, until
// `settled()` returns true, which makes kTimeout the outcome, or until `timeout_s` has passed. The
// main thread waits in short slices and runs Python's signal handlers between them.
template <typename Wait, typename Settled>
Status WaitInSlices(double timeout_s, const Wait& wait, const Settled& settled) {
  constexpr double kSliceSeconds = 0.1;
  const Deadline deadline = Deadline::AfterSeconds(timeout_s);
  bool sliced = true;
  while (true) {
    const bool last = !sliced || deadline.Remaining() <= std::chrono::milliseconds(100);
    const Status outcome = [&] {
      const GilRelease release;
      return wait(last ? deadline : Deadline::AfterSeconds(kSliceSeconds));
    }();
    if (last || outcome.code() != StatusCode::kTimeout || settled()) return outcome;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    sliced = MainThread().IsThisThread();
  }
}

}  // namespace sparkhvd::bindings
