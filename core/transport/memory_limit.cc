#include "transport/memory_limit.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/io_status.h"

namespace sparkhvd {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

uint64_t ReadLimit(const std::string& path) {
  std::ifstream file(path);
  uint64_t limit = kNoLimit;
  // "max", which is not a number, means that there is no limit.
  return file >> limit ? limit : kNoLimit;
}

// Returns the smallest limit of the group and its parents. In a container, `path` may be the path
// on the host. Then only its last part, or no part, is visible here, and only the visible groups
// count.
uint64_t SmallestLimit(const std::string& folder, std::string path, const std::string& name) {
  uint64_t limit = ReadLimit(folder + "/" + name);
  while (path.size() > 1) {
    limit = std::min(limit, ReadLimit(folder + path + "/" + name));
    path.erase(path.rfind('/'));
  }
  return limit;
}

}  // namespace

uint64_t ControlGroupLimit(const std::string& membership, const std::string& root) {
  uint64_t limit = kNoLimit;
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    // "hierarchy:controllers:path"; version 2 has no controllers.
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/') continue;
    if (controllers == ",,") {
      limit = std::min(limit, SmallestLimit(root, path, "memory.max"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      limit = std::min(limit, SmallestLimit(root + "/memory", path, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

Result<uint64_t> MemoryLimit() {
  struct sysinfo info{};
  if (::sysinfo(&info) != 0) return IoStatus("sysinfo", errno);
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream membership;
  membership << file.rdbuf();
  return std::min(uint64_t{info.totalram} * info.mem_unit,
                  ControlGroupLimit(membership.str(), "/sys/fs/cgroup"));
}

}  // namespace sparkhvd
