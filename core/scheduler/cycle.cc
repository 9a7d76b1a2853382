#include "scheduler/cycle.h"

#include <algorithm>
#include <utility>

#include "scheduler/substitute.h"

namespace sparkhvd {
namespace {

using Clock = Deadline::Clock;

constexpr std::chrono::microseconds kShortestPause{50};
constexpr std::chrono::microseconds kLongestPause{5000};

}  // namespace

// Every operation gets its outcome even when memory runs out: a failure must neither end the
// process nor leave a thread waiting.
Status Cycle::Run(Deadline patience) noexcept {
  Status status = Guarded([&] { return Advance(patience); });
  if (!status.ok()) state_ = State::kFailed;
  return status;
}

Status Cycle::Advance(Deadline patience) {
  switch (state_) {
    case State::kIdle:
    case State::kPending:
      SHVD_TRY(Enter());
      return Conclude(patience);
    case State::kEntered:
      return Conclude(patience);
    case State::kFailed:
      break;
  }
  return Status(StatusCode::kInternal, "no cycle can follow a failed one");
}

SubmissionQueue::Due Cycle::due() const {
  if (state_ == State::kEntered) return SubmissionQueue::kAtOnce;
  if (state_ == State::kPending) return pause_end_;
  return {};
}

Status Cycle::Enter() {
  const std::vector<OperationPointer> submitted = parts_.queue.Take();
  std::vector<const Request*> requests;
  requests.reserve(submitted.size());
  const auto now = Clock::now();
  Clock::duration queued{0};
  for (const OperationPointer& operation : submitted) {
    requests.push_back(&operation->request());
    pending_[operation->request().name] = operation;
    queued += now - operation->submitted();
    if (parts_.timeline.on()) parts_.timeline.Enter(operation->request().name, Phase::kNegotiate);
  }
  parts_.counters.queue_us += Microseconds(queued);
  RequestMessage report = parts_.negotiation.Report(requests);
  if (autotuner_) report.retuning = autotuner_->TakeRetuning();
  entered_ = Entered{Deadline::AfterSeconds(collective_timeout_s_), now, submitted.size(), false};
  state_ = State::kEntered;
  parts_.counters.cache_hits += report.cached.size();
  const Bytes room = parts_.negotiation.Announce(report);
  if (report.requests.empty() &&
      parts_.execution.MayDeposit({submitted.data(), submitted.size()}, room)) {
    std::vector<OperationPointer> in_order;
    for (const uint32_t id : report.cached) {
      in_order.push_back(pending_[parts_.negotiation.cache().Own(id).name]);
    }
    parts_.execution.Deposit({in_order.data(), in_order.size()}, room);
    entered_.deposited = true;
  }
  return parts_.negotiation.Enter();
}

Status Cycle::Conclude(Deadline patience) {
  const Result<Outcome> outcome =
      parts_.negotiation.Conclude(Deadline::Earlier(patience, entered_.deadline));
  if (outcome.status().code() == StatusCode::kTimeout && patience.Expired() &&
      !entered_.deadline.Expired()) {
    return Status();  // the next thread to drive continues the wait
  }
  if (!outcome.ok()) return outcome.status().Annotate("pending here " + PendingTitles());
  ++parts_.counters.cycles;
  parts_.counters.negotiation_us += Microseconds(Clock::now() - entered_.start);
  if (parts_.timeline.on()) parts_.timeline.MarkCycle();

  const auto& [response, deposits] = outcome.value();
  const Result<std::vector<ReadyOperation>> ready = Resolve(response);
  SHVD_TRY(ready.status());
  state_ = pending_.empty() ? State::kIdle : State::kPending;
  if (response.retuning) Retune(*response.retuning);
  if (autotuner_) ObserveForTuning(ready.value());
  Pause(entered_.submitted == 0 && response.cached.empty() && response.agreements.empty());
  if (!entered_.deposited || !deposits) return parts_.dispatcher.Run(ready.value());
  parts_.dispatcher.Combine(ready.value(), *deposits);
  return Status();
}

void Cycle::Pause(bool idle) {
  pause_ =
      idle ? std::clamp(2 * pause_, kShortestPause, kLongestPause) : std::chrono::microseconds{0};
  pause_end_ = Clock::now() + pause_;
}

// All ranks retune in the same cycle, before they run its operations.
void Cycle::Retune(const Retuning& retuning) {
  parts_.execution.Retune(retuning.tunables);
  if (autotuner_) autotuner_->Begin();
  if (retuning.last) autotuner_.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  tuning_ = retuning;
}

Retuning Cycle::tuning() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tuning_;
}

void Cycle::ObserveForTuning(const std::vector<ReadyOperation>& ready) {
  std::vector<Autotuner::Piece> pieces;
  for (const ReadyOperation& entry : ready) {
    const Request& request = entry.operation->request();
    if (request.kind != OperationKind::kAllreduce) continue;
    pieces.push_back(Autotuner::Piece{request.name, entry.operation->bytes()});
  }
  autotuner_->Run(pieces, Clock::now());
}

Result<std::vector<ReadyOperation>> Cycle::Resolve(const ResponseMessage& response) {
  std::vector<ReadyOperation> ready;
  ResponseCache& cache = parts_.negotiation.cache();
  for (const uint32_t id : response.cached) {
    OperationPointer operation = cache.Contains(id) ? TakePending(cache.Own(id).name) : nullptr;
    if (!operation) {
      return Status(StatusCode::kInternal, "the coordinator calls for operation " +
                                               std::to_string(id) + ", which is not pending here");
    }
    cache.Touch(id);
    ready.push_back(ReadyOperation{std::move(operation), cache.Rows(id)});
  }
  for (const Agreement& agreement : response.agreements) {
    Result<OperationPointer> operation = Accept(agreement);
    SHVD_TRY(operation.status());
    if (operation.value())
      ready.push_back(ReadyOperation{std::move(operation).value(), agreement.rows});
  }
  return ready;
}

// Returns the operation to run, or null if there is none.
Result<Cycle::OperationPointer> Cycle::Accept(const Agreement& agreement) {
  OperationPointer operation = TakePending(agreement.name);
  if (agreement.code != StatusCode::kOk) {
    if (operation) {
      parts_.dispatcher.Complete({&operation, 1}, Status(agreement.code, agreement.message));
    }
    return OperationPointer();
  }
  if (operation) {
    // Agreements with joined ranks are not stored, because their rows differ from those with all
    // ranks.
    if (!agreement.request && operation->request().kind != OperationKind::kJoin) {
      parts_.negotiation.Remember(operation->request(), agreement.rows);
    }
    return operation;
  }
  if (agreement.request) return SubstituteFor(*agreement.request);
  return Status(StatusCode::kInternal, "the coordinator calls for operation '" + agreement.name +
                                           "', which is not pending here");
}

Cycle::OperationPointer Cycle::TakePending(std::string_view name) {
  const auto found = pending_.find(name);
  if (found == pending_.end()) return nullptr;
  OperationPointer operation = std::move(found->second);
  pending_.erase(found);
  return operation;
}

std::string Cycle::PendingTitles() const {
  constexpr size_t kShown = 5;
  std::vector<std::string> titles;
  for (const auto& [name, operation] : pending_) titles.push_back(operation->request().Title());
  std::sort(titles.begin(), titles.end());
  std::string text = "(";
  for (size_t i = 0; i < titles.size() && i < kShown; ++i) text += (i > 0 ? ", " : "") + titles[i];
  if (titles.size() > kShown) text += " and " + std::to_string(titles.size() - kShown) + " more";
  return text + ")";
}

}  // namespace sparkhvd
