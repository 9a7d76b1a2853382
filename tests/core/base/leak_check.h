// Counts what this process holds, so that a test can tell that nothing was left behind.
#pragma once

#include <dirent.h>

#include <memory>
#include <string>

namespace sparkhvd {

inline int CountEntries(const char* folder) {
  const auto close = [](DIR* open) { ::closedir(open); };
  const std::unique_ptr<DIR, decltype(close)> entries(::opendir(folder), close);
  int count = 0;
  while (::readdir(entries.get()) != nullptr) ++count;
  return count;
}

struct Holdings {
  int descriptors = CountEntries("/proc/self/fd");
  int threads = CountEntries("/proc/self/task");
  bool operator==(const Holdings& other) const {
    return descriptors == other.descriptors && threads == other.threads;
  }
};

inline std::string ToText(const Holdings& holdings) {
  return std::to_string(holdings.descriptors) + " descriptors, " +
         std::to_string(holdings.threads) + " threads";
}

}  // namespace sparkhvd
