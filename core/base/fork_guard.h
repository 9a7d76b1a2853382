// Detects forked children. A child has none of the core's threads, and the sockets that it inherits
// belong to the parent.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace sparkhvd {

// A check costs one memory read, because the kernel zeroes the guard's page in a child.
class ForkGuard {
 public:
  ForkGuard() : owner_(::getpid()) {
    void* page =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (::madvise(page, kBytes, MADV_WIPEONFORK) != 0) {
      ::munmap(page, kBytes);
      return;
    }
    mark_ = new (page) std::atomic<int>(1);
  }
  ~ForkGuard() {
    if (mark_ != nullptr) ::munmap(mark_, kBytes);
  }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Returns whether this process is a forked child of the process that made the guard.
  bool InChild() const {
    if (mark_ != nullptr) return mark_->load(std::memory_order_relaxed) == 0;
    return ::getpid() != owner_;
  }

 private:
  static constexpr size_t kBytes = 4096;
  const pid_t owner_;
  std::atomic<int>* mark_ = nullptr;
};

inline constexpr char kForked[] =
    "this process was forked from a rank and is not a rank; use collectives in the rank's own "
    "process only";

}  // namespace sparkhvd
