// How an engine ends, and the thread that works until then.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/status.h"
#include "scheduler/failure_board.h"
#include "scheduler/submission_queue.h"

namespace sparkhvd {

// Owns the engine's thread and the reason for the end. The state only advances:
//
//   kRunning -> kEnding  End, Abort or Shutdown, each on any thread. The first reason stays, and
//                        the queue is closed with it.
//   kEnding  -> kEnded   the engine's thread, when its work has returned. If the work returns while
//                        the state is kRunning, the engine ends with kInternal first.
//   kEnded   -> kLeft    Shutdown, after it has joined the thread and closed the links
//   kEnding  -> kLeft    Shutdown, if the thread was never started
class Lifecycle {
 public:
  enum class State { kRunning, kEnding, kEnded, kLeft };

  // What the end does to the links to the other ranks.
  struct Links {
    std::function<void(const Status&)> abort;  // ends all waits for links, here and on the peers
    std::function<void()> close;               // called once, after the thread has ended
  };

  Lifecycle(FailureBoard board, int rank, SubmissionQueue& queue, Links links)
      : board_(std::move(board)), rank_(rank), queue_(queue), links_(std::move(links)) {}
  ~Lifecycle();
  Lifecycle(const Lifecycle&) = delete;
  Lifecycle& operator=(const Lifecycle&) = delete;

  const FailureBoard& board() const { return board_; }
  State state() const;

  // Starts the engine's thread, pinned to a core if one is set. `work` returns once the queue is
  // closed. Call it once.
  void Start(std::optional<int> processor_core, std::function<void()> work);

  // Returns the reason for the end. OK while the engine runs.
  Status Reason() const noexcept;

  // Like Reason(), but OK after an orderly Shutdown.
  Status Failure() const;

  // Like Reason(), but also looks on the board for failures of other ranks. A rank that waits for
  // its device may not notice such failures otherwise. Only the thread that has the turn may call
  // it.
  Status Poll();

  // Returns the failure that came first on any rank: the reason for the end if there is one, the
  // first failure on the board, or `own`.
  Status FirstFailure(const Status& own) noexcept;

  // Ends this rank and aborts the links.
  void End(const Status& why) noexcept;

  // Ends all ranks with the failure that came first.
  void EndTogether(const Status& own) noexcept { End(FirstFailure(own)); }

  // Ends all ranks with kAborted, unless this rank has ended already.
  void Abort(const std::string& why);

  // Ends this rank without a failure, waits for its thread and closes the links. Fails with
  // kTimeout at the deadline, and may then be called again.
  Status Shutdown(Deadline deadline);

 private:
  void Main(std::optional<int> processor_core, const std::function<void()>& work);
  void BeginEnd(const Status& why) noexcept;
  void Advance(State state);

  const FailureBoard board_;
  const int rank_;
  SubmissionQueue& queue_;
  const Links links_;
  Deadline::Clock::time_point next_look_{};  // at the board; for the thread that has the turn

  mutable std::mutex mutex_;  // guards the fields below; taken before the queue's
  std::condition_variable ended_;
  State state_ = State::kRunning;
  Status reason_;  // never changes once the state is not kRunning

  std::mutex leave_mutex_;  // one Shutdown or Abort at a time; taken before all others
  std::thread thread_;
};

}  // namespace sparkhvd
