#include "collectives/lane_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

#include "base/wait.h"

namespace sparkhvd {

LaneThread::LaneThread(std::function<Status(Slice)> exchange, bool overlap)
    : exchange_(std::move(exchange)) {
  if (!overlap) return;
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch): works without a thread
  }
}

LaneThread::~LaneThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LaneThread::Begin(Slice part) {
  if (!thread_.joinable()) return Note(exchange_(part));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_.push_back(part);
  }
  changed_.notify_all();
}

Status LaneThread::AwaitNext() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (exchanged_ == reported_ && failure_.ok()) AwaitNotification(changed_, lock);
  if (!failure_.ok()) return failure_;
  ++reported_;
  return Status();
}

bool LaneThread::busy() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exchanged_ < parts_.size() && failure_.ok();
}

void LaneThread::Run() {
  pthread_setname_np(pthread_self(), "shvd-lane");
  sigset_t all;  // the program's own threads handle signals
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    while (exchanged_ == parts_.size() && !ending_) AwaitNotification(changed_, lock);
    if (ending_) return;
    const Slice part = parts_[exchanged_];
    lock.unlock();
    Status status = Guarded([&] { return exchange_(part); });
    const bool good = status.ok();
    Note(std::move(status));
    if (!good) return;
    lock.lock();
  }
}

void LaneThread::Note(Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok()) {
      ++exchanged_;
    } else {
      failure_ = std::move(status);
    }
  }
  changed_.notify_all();
}

}  // namespace sparkhvd
