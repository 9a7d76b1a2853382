// Where a user reads what the autotuner tried.
#pragma once

#include <fstream>
#include <memory>
#include <string>

#include "base/status.h"
#include "scheduler/autotuner.h"

namespace sparkhvd {

// A file of comma-separated values: a header, then a line per sample, complete as soon as it is
// written. What it held before is replaced.
class AutotuneLog {
 public:
  static Result<std::shared_ptr<AutotuneLog>> Open(const std::string& path);

  explicit AutotuneLog(std::ofstream file) : file_(std::move(file)) {}

  // A job doesn't end because a disk is full: what cannot be written is missing.
  void Write(const TuningSample& sample);

 private:
  std::ofstream file_;
};

}  // namespace sparkhvd
