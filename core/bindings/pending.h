// The operations that are not done yet.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
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
    while (!operations_.empty() && Ended(operations_.front())) operations_.pop_front();
    operations_.emplace_back(operation);
  }

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

  static bool Ended(const std::weak_ptr<Operation>& entry) {
    const std::shared_ptr<Operation> operation = entry.lock();
    return !operation || operation->done();
  }

  // In the order of submission, which is roughly the order of completion. The pointers are weak,
  // because an operation without an owner is done.
  std::deque<std::weak_ptr<Operation>> operations_;
  std::atomic<Time> direct_since_{Time{}};
};

}  // namespace sparkhvd::bindings
