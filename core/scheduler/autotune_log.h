// The autotuner's log for users.
#pragma once

#include <fstream>
#include <memory>
#include <string>

#include "base/status.h"
#include "scheduler/autotuner.h"

namespace sparkhvd {

// A CSV file: a header, then a line per sample, each flushed at once. Replaces existing content.
class AutotuneLog {
 public:
  static Result<std::shared_ptr<AutotuneLog>> Open(const std::string& path);

  explicit AutotuneLog(std::ofstream file) : file_(std::move(file)) {}

  // Drops lines that cannot be written, so that a full disk does not end the job.
  void Write(const TuningSample& sample);

 private:
  std::ofstream file_;
};

}  // namespace sparkhvd
