#include "scheduler/lifecycle.h"

#include <pthread.h>
#include <signal.h>

#include <cassert>
#include <chrono>

#include "scheduler/affinity.h"

namespace sparkhvd {
namespace {

constexpr std::chrono::seconds kLookInterval(1);

}  // namespace

Lifecycle::~Lifecycle() { static_cast<void>(Shutdown(Deadline::Never())); }

Lifecycle::State Lifecycle::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

void Lifecycle::Start(std::optional<int> processor_core, std::function<void()> work) {
  thread_ =
      std::thread([this, processor_core, work = std::move(work)] { Main(processor_core, work); });
}

void Lifecycle::Main(std::optional<int> processor_core, const std::function<void()>& work) {
  pthread_setname_np(pthread_self(), "shvd-engine");
  sigset_t all;  // the program's own threads handle signals
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  if (processor_core) {
    if (const Status pinned = PinThisThread(*processor_core); !pinned.ok()) EndTogether(pinned);
  }
  work();
  if (state() == State::kRunning) {
    EndTogether(Status(StatusCode::kInternal, "the engine's thread has stopped"));
  }
  Advance(State::kEnded);
}

Status Lifecycle::Reason() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return AnnotateIfPossible(reason_, "");
}

Status Lifecycle::Failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_.code() == StatusCode::kShutDown ? Status() : reason_;
}

Status Lifecycle::Poll() {
  SHVD_TRY(Reason());
  const auto now = Deadline::Clock::now();
  if (now < next_look_) return Status();
  next_look_ = now + kLookInterval;
  return board_.Look();
}

Status Lifecycle::FirstFailure(const Status& own) noexcept {
  Status first;
  const Status looked_up = Guarded([&] {
    first = Reason();
    if (first.ok()) first = board_.First(own, rank_);
    return Status();
  });
  if (!looked_up.ok()) return AnnotateIfPossible(own, "");
  return first;  // moved: a copy may need memory
}

void Lifecycle::End(const Status& why) noexcept {
  BeginEnd(why);
  links_.abort(why);
}

void Lifecycle::BeginEnd(const Status& why) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::kRunning) return;
  reason_ = AnnotateIfPossible(why, "");
  state_ = State::kEnding;
  queue_.Close(reason_);
}

void Lifecycle::Abort(const std::string& why) {
  const std::lock_guard<std::mutex> leaving(leave_mutex_);
  const Status status(StatusCode::kAborted, why);
  if (state() != State::kRunning) return;
  // Publish the reason on the board before the links break, so that every peer finds it there.
  EndTogether(status);
}

Status Lifecycle::Shutdown(Deadline deadline) {
  const std::lock_guard<std::mutex> leaving(leave_mutex_);
  if (state() == State::kLeft) return Status();
  const Status why(StatusCode::kShutDown, "this rank has shut down");
  BeginEnd(why);
  // Without operations in flight, the thread waits for no peer. Peers that are still busy with an
  // operation that has ended here must not be disturbed.
  if (queue_.HasInFlight()) links_.abort(why);
  if (thread_.joinable()) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!ended_.wait_until(lock, deadline.at(), [this] { return state_ == State::kEnded; })) {
        return Status(StatusCode::kTimeout, "the engine has not ended yet");
      }
    }
    thread_.join();
  }
  links_.close();
  Advance(State::kLeft);
  return Status();
}

void Lifecycle::Advance(State state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  assert(state_ < state && "a lifecycle only advances");
  state_ = state;
  ended_.notify_all();
}

}  // namespace sparkhvd
