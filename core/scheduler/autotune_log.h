// The autotuner's log for users.
#pragma once

#include <fstream>
#include <memory>
#include <string>

#include "base/status.h"
#include "scheduler/autotuner.h"

namespace sparkhvd {

// A file of comma-separated values: a header, then a line per sample, each flushed at once.
// Existing content is replaced.
class AutotuneLog {
 public:
  static Result<std::shared_ptr<AutotuneLog>> Open(const std::string& path);

  explicit AutotuneLog(std::ofstream file) : file_(std::move(file)) {}

  // A full disk does not end the job: lines that cannot be written are dropped.
  void Write(const TuningSample& sample);

 private:
  std::ofstream file_;
};

}  // namespace sparkhvd
