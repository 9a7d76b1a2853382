// Counts the resources that this process holds, so that a test can check for leaks.
#pragma once

#include <dirent.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

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

// Counts the resources before a test. Runs a thread first, because the first thread makes
// ThreadSanitizer start its own thread, which stays.
inline Holdings HoldingsBefore() {
  std::thread([] {}).join();
  return Holdings();
}

// Counts the resources after a test. The kernel lists a thread for a moment after it has been
// joined, so a difference counts only if it lasts.
inline Holdings HoldingsAfter(const Holdings& before) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  Holdings now;
  while (!(now == before) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
    now = Holdings();
  }
  return now;
}

inline std::string ToText(const Holdings& holdings) {
  return std::to_string(holdings.descriptors) + " descriptors, " +
         std::to_string(holdings.threads) + " threads";
}

}  // namespace sparkhvd
