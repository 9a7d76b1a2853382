// The cycles of one rank: what it reports to the other ranks, and what they agree on.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "scheduler/autotuner.h"
#include "scheduler/counters.h"
#include "scheduler/dispatcher.h"
#include "scheduler/execution.h"
#include "scheduler/negotiation.h"
#include "scheduler/operation.h"
#include "scheduler/submission_queue.h"
#include "scheduler/tunables.h"
#include "timeline/timeline.h"

namespace sparkhvd {

// Ranks run cycles in lockstep. A cycle lasts until all ranks have entered it, so no rank waits for
// a tick, and an idle job costs nothing. A cycle makes no progress if every rank waits for
// operations that others have not submitted yet. The next cycle is then delayed by up to
// kLongestPause, or until an operation is submitted here.
//
//   kIdle, kPending -> kEntered   Run: this rank has reported its submissions
//   kEntered -> kEntered          Run: the patience ended before all ranks had entered
//   kEntered -> kIdle, kPending   Run: the ranks agreed, and the operations have run
//   any state -> kFailed          Run failed. Every later Run fails, too.
//
// Only the thread that has the turn may use a Cycle, except for tuning().
class Cycle {
 public:
  enum class State {
    kIdle,     // no operation is pending
    kPending,  // other ranks have not submitted all of this rank's operations
    kEntered,  // this rank has entered a cycle that is not concluded
    kFailed
  };
  using Time = Deadline::Clock::time_point;

  struct Parts {
    SubmissionQueue& queue;
    Negotiation& negotiation;
    Execution& execution;
    Dispatcher& dispatcher;
    EngineTimeline& timeline;
    Counters& counters;
  };

  // `autotuner` is null except on rank 0 during a search. `tuning` are the settings in force.
  Cycle(const Parts& parts, std::unique_ptr<Autotuner> autotuner, const Retuning& tuning,
        double collective_timeout_s)
      : parts_(parts),
        collective_timeout_s_(collective_timeout_s),
        autotuner_(std::move(autotuner)),
        tuning_(tuning) {}

  State state() const { return state_; }

  // Runs one cycle, or as much of it as `patience` allows if waiting can be interrupted. After a
  // failure, all ranks must end.
  Status Run(Deadline patience) noexcept;

  // Returns when the next Run is due even without a submission, or nothing if no Run is due.
  SubmissionQueue::Due due() const;

  // Returns whether the last Run concluded a cycle with progress, so that another cycle may follow
  // at once.
  bool made_progress() const { return state_ != State::kEntered && pause_.count() == 0; }

  // Returns the delay of the next cycle. Zero after a cycle with progress.
  std::chrono::microseconds pause() const { return pause_; }

  // Drops the pending operations. Call it once the engine has ended.
  void DropPending() { pending_.clear(); }

  // Returns the settings in force on all ranks and whether they may still change. Any thread may
  // call it.
  Retuning tuning() const;

 private:
  using OperationPointer = std::shared_ptr<Operation>;

  // The cycle in the state kEntered.
  struct Entered {
    Deadline deadline;
    Time start;
    size_t submitted = 0;
    bool deposited = false;
  };

  Status Advance(Deadline patience);
  Status Enter();
  Status Conclude(Deadline patience);
  void Pause(bool idle);
  void Retune(const Retuning& retuning);
  void ObserveForTuning(const std::vector<ReadyOperation>& ready);
  Result<std::vector<ReadyOperation>> Resolve(const ResponseMessage& response);
  Result<OperationPointer> Accept(const Agreement& agreement);
  OperationPointer TakePending(std::string_view name);
  std::string PendingTitles() const;

  const Parts parts_;
  const double collective_timeout_s_;
  std::unique_ptr<Autotuner> autotuner_;
  State state_ = State::kIdle;
  Entered entered_{Deadline::Never(), {}, 0, false};
  std::unordered_map<std::string_view, OperationPointer> pending_;  // by name
  std::chrono::microseconds pause_{0};
  Time pause_end_{};

  mutable std::mutex mutex_;  // guards tuning_; innermost in the lock order
  Retuning tuning_;
};

}  // namespace sparkhvd
