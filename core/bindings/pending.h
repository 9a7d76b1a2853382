// Which submitted operations are not done yet.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/operation.h"

namespace sparkhvd::bindings {

// Needs no lock: it is used with the GIL held.
class PendingOperations {
 public:
  void Add(const std::shared_ptr<Operation>& operation) {
    while (!operations_.empty() && Ended(operations_.front())) operations_.pop_front();
    operations_.emplace_back(operation);
  }

  // Title and age in seconds, oldest first.
  std::vector<std::pair<std::string, double>> List() const {
    const auto now = Deadline::Clock::now();
    std::vector<std::pair<std::string, double>> pending;
    for (const std::weak_ptr<Operation>& entry : operations_) {
      const std::shared_ptr<Operation> operation = entry.lock();
      if (!operation || operation->done()) continue;
      const std::chrono::duration<double> age = now - operation->submitted();
      pending.emplace_back(operation->request().Title(), age.count());
    }
    return pending;
  }

 private:
  static bool Ended(const std::weak_ptr<Operation>& entry) {
    const std::shared_ptr<Operation> operation = entry.lock();
    return !operation || operation->done();
  }

  // In the order of submission, which is about that of completion. Weak: what nobody else holds any
  // more is done.
  std::deque<std::weak_ptr<Operation>> operations_;
};

}  // namespace sparkhvd::bindings
