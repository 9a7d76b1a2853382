// The memory limit of this process.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace sparkhvd {

// Returns the memory of the host or the smallest limit of this process's control groups, whichever
// is less, in bytes.
Result<uint64_t> MemoryLimit();

// Returns the smallest limit of the groups in `membership`, the text of /proc/self/cgroup, whose
// files are below `root`. Returns the largest number if there is no limit. Supports both versions
// of control groups.
uint64_t ControlGroupLimit(const std::string& membership, const std::string& root);

}  // namespace sparkhvd
