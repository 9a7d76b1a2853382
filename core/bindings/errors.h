// Converts failures of the core into Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <utility>

#include "base/status.h"

namespace sparkhvd::bindings {

// A failure as a C++ exception, which Python sees as CoreError(code, message).
class CoreFailure {
 public:
  explicit CoreFailure(Status status) : status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

inline void Check(const Status& status) {
  if (!status.ok()) throw CoreFailure(status);
}

template <typename T>
T Take(Result<T> result) {
  Check(result.status());
  return std::move(result).value();
}

void RegisterErrors(pybind11::module_& module);

}  // namespace sparkhvd::bindings
