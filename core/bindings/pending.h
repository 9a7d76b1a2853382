// The operations that are not done yet.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/operation.h"

namespace sparkhvd::bindings {

// Needs no lock, because its users hold the GIL, except in DirectCallWaits.
class PendingOperations {
 public:
  void Add(const std::shared_ptr<Operation>& operation) {
    if (operations_.size() >= limit_) EraseEnded();
    operations_.emplace_back(operation);
  }

  // Returns the number of entries, including some whose operations have ended.
  size_t size() const { return operations_.size(); }

  // Records a direct call that waits for other ranks, until DirectCallEnded.
  void DirectCallWaits() {
    Time none{};
    direct_since_.compare_exchange_strong(none, Deadline::Clock::now());
  }
  void DirectCallEnded() { direct_since_ = Time{}; }

  // Returns titles and ages in seconds, oldest first.
  std::vector<std::pair<std::string, double>> List() const {
    const auto now = Deadline::Clock::now();
    std::vector<std::pair<std::string, double>> pending;
    if (const Time since = direct_since_; since != Time{}) {
      const std::chrono::duration<double> age = now - since;
      pending.emplace_back("direct allreduce", age.count());
    }
    for (const std::weak_ptr<Operation>& entry : operations_) {
      const std::shared_ptr<Operation> operation = entry.lock();
      if (!operation || operation->done()) continue;
      const std::chrono::duration<double> age = now - operation->submitted();
      pending.emplace_back(operation->request().Title(), age.count());
    }
    return pending;
  }

 private:
  using Time = Deadline::Clock::time_point;

  // Even if the first operation never ends, an operation costs constant time on average.
  void EraseEnded() {
    operations_.erase(std::remove_if(operations_.begin(), operations_.end(), Ended),
                      operations_.end());
    limit_ = std::max(kSmallestLimit, 2 * operations_.size());
  }

  static bool Ended(const std::weak_ptr<Operation>& entry) {
    const std::shared_ptr<Operation> operation = entry.lock();
    return !operation || operation->done();
  }

  static constexpr size_t kSmallestLimit = 16;

  // In the order of submission. The pointers are weak, because an operation without an owner is
  // done.
  std::vector<std::weak_ptr<Operation>> operations_;
  size_t limit_ = kSmallestLimit;  // twice the entries that remained when ended ones were erased
  std::atomic<Time> direct_since_{Time{}};
};

}  // namespace sparkhvd::bindings
