#include "device/launch_order.h"

#include <algorithm>
#include <chrono>

namespace sparkhvd {
namespace {

// The interval at which a collective that waits for its turn checks for failures.
constexpr std::chrono::milliseconds kCheckInterval(20);

}  // namespace

std::unique_ptr<LaunchOrder::Turn> LaunchOrder::Propose(const std::string& communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Turn::Position position{++latest_, communicator};
  turns_.insert(position);
  return std::unique_ptr<Turn>(new Turn(*this, std::move(position)));
}

Status LaunchOrder::Turn::Await(uint64_t ticket, const Waiting& waiting) {
  std::unique_lock<std::mutex> lock(order_.mutex_);
  order_.latest_ = std::max(order_.latest_, ticket);
  order_.turns_.erase(position_);
  position_.first = ticket;
  order_.turns_.insert(position_);
  order_.changed_.notify_all();
  while (*order_.turns_.begin() != position_) {
    if (waiting.deadline.Expired()) {
      const std::string& first = order_.turns_.begin()->second;
      return Status(StatusCode::kTimeout, "a collective of " +
                                              (first.empty() ? std::string("all ranks") : first) +
                                              " is ahead on the CUDA device and has not started");
    }
    order_.changed_.wait_for(lock, kCheckInterval);
    lock.unlock();
    const Status failure = waiting.check();
    lock.lock();
    SHVD_TRY(failure);
  }
  return Status();
}

LaunchOrder::Turn::~Turn() {
  const std::lock_guard<std::mutex> lock(order_.mutex_);
  order_.turns_.erase(position_);
  order_.changed_.notify_all();
}

}  // namespace sparkhvd
