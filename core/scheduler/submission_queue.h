// The operations that the threads of a rank have submitted, and the turn to drive their cycles.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "scheduler/operation.h"
#include "timeline/timeline.h"

namespace sparkhvd {

// When an operation starts.
enum class Start {
  kNow,        // on the engine's thread, after a short gathering
  kWithWaiter  // on the thread that waits for it, or with the next kNow
};

// Any thread may push. Only the thread that has the turn takes operations. One thread at a time has
// the turn: the engine's thread, which waits for it, or a thread that waits for an operation, which
// takes it if no other thread has it.
//
// A name is in flight from Push to Release, and only once at a time. Submissions without a waiter
// are gathered for up to kGathering, or until they reach kEnoughBytes, before the engine's thread
// gets a turn for them.
class SubmissionQueue {
 public:
  using OperationPointer = std::shared_ptr<Operation>;
  using Time = Deadline::Clock::time_point;

  // If `waiters_drive`, a push with Start::kWithWaiter leaves the turn to the waiter.
  SubmissionQueue(bool waiters_drive, EngineTimeline& timeline)
      : waiters_drive_(waiters_drive), timeline_(timeline) {}

  // Takes all operations or none. Fails with kInvalidArgument for a name that is in flight and
  // while a join is in flight, and with the reason passed to Close after Close.
  Status Push(Span<const OperationPointer> operations, Start start);

  // Ends the gathering: the engine's thread gets the turn at once, unless another thread has it.
  void StartNow();

  // The reason why the engine's thread gets the turn.
  enum class Turn {
    kSubmissions,  // there are submissions to take
    kDue,          // the time that the previous turn set has come
    kClosed        // never again: the queue is closed and no thread has the turn
  };

  // The time of work that is due without a submission. kAtOnce precedes gathered submissions.
  using Due = std::optional<Time>;
  static constexpr Time kAtOnce = Time::min();

  // Waits for the turn of the engine's thread. Only that thread may call it.
  Turn AwaitTurn();

  // Ends the turn of the engine's thread and waits for its next one.
  Turn AwaitNextTurn(Due due);

  // Takes the turn for a waiting thread. Returns false if another thread has it, and once the queue
  // is closed: then the engine's thread cleans up.
  bool TryTurn();

  // Ends the turn of a waiting thread. The engine's thread continues with work that is left.
  void EndTurn(Due due);

  // Removes the submissions in the order of their pushes. Only the thread that has the turn may
  // call it.
  std::vector<OperationPointer> Take();

  // Frees the names of operations that get their outcome.
  void Release(Span<const OperationPointer> operations);

  // Makes all later pushes fail with the first reason, and ends the waits of the engine's thread.
  void Close(const Status& why) noexcept;
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  bool HasInFlight() const;

  // Drops the submissions that no thread has taken. Returns any operation in flight, or null once
  // all are released. Call it after Close.
  OperationPointer AnyInFlight();

 private:
  Turn Await(std::unique_lock<std::mutex>& lock);
  // The following functions require mutex_.
  Status TakeIn(Span<const OperationPointer> operations);
  void TakeBack(Span<const OperationPointer> operations, size_t queued);
  Status Refusal(const Request& request) const;

  const bool waiters_drive_;
  EngineTimeline& timeline_;

  mutable std::mutex mutex_;      // guards the fields below; taken before an Operation's mutex
  std::condition_variable wake_;  // wakes the engine's thread
  bool turn_taken_ = false;
  Due due_;
  std::vector<OperationPointer> queue_;
  size_t queued_bytes_ = 0;
  bool gathering_ = false;  // the engine's thread takes the queue at gathered_
  Time gathered_{};
  // Queued, pending and running operations by name, so that every failure reaches them all.
  std::unordered_map<std::string_view, OperationPointer> in_flight_;
  bool joined_ = false;  // whether a join is in flight
  std::optional<Status> refusal_;
  std::atomic<bool> closed_{false};  // whether refusal_ is set; may be read without the mutex
};

}  // namespace sparkhvd
