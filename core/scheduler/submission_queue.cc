#include "scheduler/submission_queue.h"

#include <chrono>
#include <utility>

#include "base/wait.h"

namespace sparkhvd {
namespace {

using Clock = Deadline::Clock;

constexpr std::chrono::microseconds kGathering{150};
constexpr size_t kEnoughBytes = size_t{1} << 20;

}  // namespace

Status SubmissionQueue::Push(Span<const OperationPointer> operations, Start start) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t queued = queue_.size();
    const Status taken = Guarded([&] { return TakeIn(operations); });
    if (!taken.ok()) {
      TakeBack(operations, queued);
      return taken;
    }
    for (const OperationPointer& operation : operations) {
      joined_ = joined_ || operation->request().kind == OperationKind::kJoin;
      queued_bytes_ += operation->bytes();
    }
    // The thread that has the turn checks the queue again before it stops.
    if (turn_taken_ || (start == Start::kWithWaiter && waiters_drive_)) return Status();
    const bool at_once = start == Start::kWithWaiter || queued_bytes_ >= kEnoughBytes;
    if (gathering_ && !at_once) return Status();  // the engine's thread takes the queue in time
    gathering_ = !at_once;
    gathered_ = at_once ? Time{} : Clock::now() + kGathering;
  }
  wake_.notify_one();
  return Status();
}

Status SubmissionQueue::TakeIn(Span<const OperationPointer> operations) {
  for (const OperationPointer& operation : operations) {
    const Request& request = operation->request();
    SHVD_TRY(Refusal(request).Annotate(request.Title()));
    if (in_flight_.emplace(request.name, operation).second) continue;
    return Status(StatusCode::kInvalidArgument,
                  "an operation with this name is already in flight; wait for it or use another "
                  "name")
        .Annotate(request.Title());
  }
  for (const OperationPointer& operation : operations) {
    queue_.push_back(operation);
    if (!timeline_.on()) continue;
    timeline_.Begin(operation->request().name, Name(operation->request().kind), operation->bytes());
  }
  return Status();
}

void SubmissionQueue::TakeBack(Span<const OperationPointer> operations, size_t queued) {
  queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(queued), queue_.end());
  for (const OperationPointer& operation : operations) {
    const auto entry = in_flight_.find(operation->request().name);
    if (entry != in_flight_.end() && entry->second == operation) in_flight_.erase(entry);
  }
}

Status SubmissionQueue::Refusal(const Request& request) const {
  if (refusal_) return *refusal_;
  if (joined_ && request.kind != OperationKind::kJoin) {
    return Status(StatusCode::kInvalidArgument,
                  "this rank has joined; wait for join() before the next operation");
  }
  return Status();
}

void SubmissionQueue::StartNow() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || turn_taken_) return;
    gathering_ = false;
    gathered_ = Time{};
  }
  wake_.notify_one();
}

SubmissionQueue::Turn SubmissionQueue::AwaitTurn() {
  std::unique_lock<std::mutex> lock(mutex_);
  return Await(lock);
}

SubmissionQueue::Turn SubmissionQueue::AwaitNextTurn(Due due) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_taken_ = false;
  due_ = due;
  return Await(lock);
}

SubmissionQueue::Turn SubmissionQueue::Await(std::unique_lock<std::mutex>& lock) {
  while (true) {
    if (turn_taken_) {
      AwaitNotification(wake_, lock);
      continue;
    }
    if (refusal_) return Turn::kClosed;
    const bool submissions = !queue_.empty() && due_ != kAtOnce;
    const Due next = submissions ? gathered_ : due_;
    if (!next) {
      AwaitNotification(wake_, lock);
    } else if (next == kAtOnce || Clock::now() >= *next) {
      turn_taken_ = true;
      return submissions ? Turn::kSubmissions : Turn::kDue;
    } else {
      wake_.wait_until(lock, *next);
    }
  }
}

bool SubmissionQueue::TryTurn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !refusal_ && !std::exchange(turn_taken_, true);
}

void SubmissionQueue::EndTurn(Due due) {
  const std::lock_guard<std::mutex> lock(mutex_);
  turn_taken_ = false;
  due_ = due;
  if (refusal_ || !queue_.empty() || due_) wake_.notify_one();
}

std::vector<SubmissionQueue::OperationPointer> SubmissionQueue::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  queued_bytes_ = 0;
  gathering_ = false;
  return std::exchange(queue_, {});
}

void SubmissionQueue::Release(Span<const OperationPointer> operations) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const OperationPointer& operation : operations) {
    in_flight_.erase(operation->request().name);
    if (operation->request().kind == OperationKind::kJoin) joined_ = false;
  }
}

void SubmissionQueue::Close(const Status& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (refusal_) return;
    refusal_ = AnnotateIfPossible(why, "");
    closed_.store(true, std::memory_order_release);
  }
  wake_.notify_one();
}

bool SubmissionQueue::HasInFlight() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !in_flight_.empty();
}

SubmissionQueue::OperationPointer SubmissionQueue::AnyInFlight() {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.clear();
  return in_flight_.empty() ? nullptr : in_flight_.begin()->second;
}

}  // namespace sparkhvd
