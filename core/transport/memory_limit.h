// The limit of this process's memory.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace sparkhvd {

// The host's memory or the smallest limit of the control groups that this process is in.
Result<uint64_t> MemoryLimit();

// The smallest limit of the groups in `membership` (the text of /proc/self/cgroup), whose files are
// below `root`; the largest number without one. Supports both versions of control groups.
uint64_t ControlGroupLimit(const std::string& membership, const std::string& root);

}  // namespace sparkhvd
