#include "scheduler/engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "scheduler/affinity.h"
#include "scheduler/fusion.h"
#include "scheduler/substitute.h"

namespace sparkhvd {
namespace {

using Clock = Deadline::Clock;

constexpr std::chrono::microseconds kShortestPause{50};
constexpr std::chrono::microseconds kLongestPause{5000};

// Limits fusion if all ranks share memory. Fused data is copied, and for more than a few ranks
// copied twice. That soon costs more than the steps it saves, and larger buffers leave the cache in
// between.
constexpr size_t kFusionInMemory = size_t{1} << 20;

// The time for which submissions without a waiter are gathered, unless they reach kEnoughBytes
// first.
constexpr std::chrono::microseconds kGathering{150};
constexpr size_t kEnoughBytes = size_t{1} << 20;

// The interval at which an otherwise idle engine checks a busy device.
constexpr std::chrono::milliseconds kDeviceInterval(50);

uint64_t MicrosecondsSince(Clock::time_point start) { return Microseconds(Clock::now() - start); }

std::vector<int> LocalRanks(const Mesh& mesh) {
  return mesh.arena ? mesh.arena->ranks() : std::vector<int>{mesh.transport->rank()};
}

std::optional<ArenaSteps> StepsOf(const Mesh& mesh) {
  std::optional<ArenaSteps> steps;
  if (mesh.arena) steps.emplace(*mesh.arena);
  return steps;
}

std::optional<DirectCalls> DirectCallsOf(const Mesh& mesh) {
  std::optional<DirectCalls> calls;
  if (mesh.direct_arena && mesh.direct_arena->count() == mesh.transport->size()) {
    calls.emplace(*mesh.direct_arena);
  }
  return calls;
}

std::unique_ptr<Negotiation> MakeNegotiation(ArenaSteps* steps, Transport& transport,
                                             const EngineConfig& config) {
  return steps != nullptr && steps->count() == transport.size()
             ? MakeArenaNegotiation(*steps, config.cache_capacity, config.collective_timeout_s)
             : MakeCoordinatedNegotiation(transport, config.cache_capacity,
                                          config.collective_timeout_s);
}

Tunables StartOf(const EngineConfig& config, const Mesh& mesh) {
  Tunables start;
  const bool share_memory = mesh.arena && mesh.arena->count() == mesh.transport->size();
  if (share_memory) start.fusion_threshold = kFusionInMemory;
  start.fusion_threshold = config.fusion_threshold.value_or(start.fusion_threshold);
  start.hierarchical = config.hierarchical_allreduce.value_or(start.hierarchical);
  return start;
}

std::unique_ptr<Autotuner> AutotunerOf(int rank, const EngineConfig& config,
                                       const Execution& execution) {
  if (rank != 0 || !config.autotune) return nullptr;
  TuningScope scope = execution.tuning_scope();
  scope.fusion = scope.fusion && !config.fusion_threshold;
  scope.hierarchical = scope.hierarchical && !config.hierarchical_allreduce;
  return std::make_unique<Autotuner>(*config.autotune, scope, execution.tunables());
}

void AbortMesh(const Mesh& mesh, const Status& why) noexcept {
  const auto abort = [&mesh](const Status& reason) {
    return Guarded([&] {
      if (mesh.arena) mesh.arena->Abort(reason);
      if (mesh.direct_arena) mesh.direct_arena->Abort(reason);
      mesh.transport->Abort(reason);
      return Status();
    });
  };
  const Status aborted = abort(why);
  if (!aborted.ok()) static_cast<void>(abort(aborted));
}

}  // namespace

Engine::Engine(const EngineConfig& config, Mesh mesh, FailureBoard board)
    : config_(config),
      mesh_(std::move(mesh)),
      board_(std::move(board)),
      rank_(mesh_.transport->rank()),
      size_(mesh_.transport->size()),
      local_ranks_(LocalRanks(mesh_)),
      host_ranks_(mesh_.host_ranks),
      timeline_(config.timeline, config.timeline_label),
      steps_(StepsOf(mesh_)),
      negotiation_(MakeNegotiation(steps_ ? &*steps_ : nullptr, *mesh_.transport, config)),
      execution_(mesh_, steps_ ? &*steps_ : nullptr, StartOf(config, mesh_),
                 config.hierarchical_allgather, timeline_, counters_),
      devices_(config.device_libraries, rank_, size_, config.label, config.shares_device),
      autotuner_(AutotunerOf(rank_, config, execution_)),
      tuning_{execution_.tunables(), !config.autotune.has_value()},
      direct_calls_(DirectCallsOf(mesh_)),
      thread_([this] { Main(); }) {}

Engine::~Engine() {
  static_cast<void>(Shutdown(Deadline::AfterSeconds(0)));
  if (thread_.joinable()) thread_.join();
}

Result<std::shared_ptr<Operation>> Engine::Submit(Request request, const std::byte* source,
                                                  std::byte* target, Start start,
                                                  const std::optional<DeviceStream>& device) {
  std::optional<Mark> mark;
  Result<OperationPointer> operation =
      Make(Submission{std::move(request), source, target, device}, mark);
  SHVD_TRY(operation.status());
  SHVD_TRY(Enqueue(Span<const OperationPointer>(&operation.value(), 1), start));
  return operation;
}

Result<std::vector<std::shared_ptr<Operation>>> Engine::SubmitAll(
    std::vector<Submission> submissions, Start start) {
  std::vector<OperationPointer> operations;
  operations.reserve(submissions.size());
  std::optional<Mark> mark;
  for (Submission& submission : submissions) {
    Result<OperationPointer> operation = Make(std::move(submission), mark);
    SHVD_TRY(operation.status());
    operations.push_back(std::move(operation).value());
  }
  SHVD_TRY(Enqueue(Span<const OperationPointer>(operations.data(), operations.size()), start));
  return operations;
}

Result<Engine::OperationPointer> Engine::Make(Submission submission, std::optional<Mark>& mark) {
  Request& request = submission.request;
  std::optional<std::string> problem = Problem(request, size_);
  if (!problem && submission.device) problem = DeviceProblem(request);
  if (problem) return Status(StatusCode::kInvalidArgument, *problem).Annotate(request.Title());
  std::unique_ptr<DeviceWork> work;
  if (submission.device) {
    if (!mark || !(mark->submitter == *submission.device)) {
      Result<std::shared_ptr<const DeviceEvent>> point = devices_.Mark(*submission.device);
      SHVD_TRY(point.status().Annotate(request.Title()));
      mark = Mark{*submission.device, std::move(point).value()};
    }
    request.on_device = request.kind != OperationKind::kJoin;
    if (request.on_device) work = std::make_unique<DeviceWork>(mark->point);
  }
  return std::make_shared<Operation>(std::move(request), submission.source, submission.target,
                                     std::move(work));
}

Status Engine::Enqueue(Span<const OperationPointer> operations, Start start) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t queued = queue_.size();
    const Status taken = Guarded([&] { return TakeIn(operations); });
    if (!taken.ok()) {
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(queued), queue_.end());
      for (const OperationPointer& operation : operations) {
        const auto entry = in_flight_.find(operation->request().name);
        if (entry != in_flight_.end() && entry->second == operation) in_flight_.erase(entry);
      }
      return taken;
    }
    for (const OperationPointer& operation : operations) {
      joined_ = joined_ || operation->request().kind == OperationKind::kJoin;
      queued_bytes_ += operation->bytes();
    }
    // The thread that drives the cycle checks the queue again before it stops.
    if (driven_ || (start == Start::kWithWaiter && negotiation_->interruptible())) {
      return Status();
    }
    const bool at_once = start == Start::kWithWaiter || queued_bytes_ >= kEnoughBytes;
    if (gathering_ && !at_once) return Status();  // the engine's thread takes the queue in time
    gathering_ = !at_once;
    gathered_ = at_once ? Clock::time_point{} : Clock::now() + kGathering;
  }
  wake_.notify_one();
  return Status();
}

Status Engine::TakeIn(Span<const OperationPointer> operations) {
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

Status Engine::Refusal(const Request& request) const {
  if (end_) return *end_;
  if (joined_ && request.kind != OperationKind::kJoin) {
    return Status(StatusCode::kInvalidArgument,
                  "this rank has joined; wait for join() before the next operation");
  }
  return Status();
}

Status Engine::Wait(Operation& operation, Deadline deadline) {
  if (operation.done()) return operation.Wait(deadline);
  if (negotiation_->interruptible()) {
    DriveUntilDone(operation, deadline);
  } else {
    StopGathering();
  }
  return operation.Wait(deadline);
}

void Engine::StartNow() { StopGathering(); }

void Engine::StopGathering() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || driven_) return;
    gathering_ = false;
    gathered_ = Clock::time_point{};
  }
  wake_.notify_one();
}

Status Engine::AllreduceNow(const Reduction& reduction, const std::byte* source, std::byte* target,
                            size_t count, const std::function<bool()>& interrupted) {
  const std::lock_guard<std::mutex> turn(direct_mutex_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_) return *end_;
  }
  const Status status =
      direct_calls_->Allreduce(reduction, source, target, count,
                               Deadline::AfterSeconds(config_.collective_timeout_s), interrupted);
  if (status.ok()) {
    CountOperations(OperationKind::kAllreduce, 1, count * SizeOf(reduction.dtype));
  } else if (status.code() != StatusCode::kMismatch) {
    const Status why = FirstFailure(status.Annotate("direct allreduce"));
    End(why);
    return why;
  }
  return status;
}

Status Engine::Failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return end_ && end_->code() != StatusCode::kShutDown ? *end_ : Status();
}

void Engine::Abort(const std::string& why) {
  const std::lock_guard<std::mutex> leaving(leave_mutex_);
  const Status status(StatusCode::kAborted, why);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_) return;
  }
  // Publish the reason on the board before the links break, so that every peer finds it there.
  EndTogether(status);
}

Status Engine::Shutdown(Deadline deadline) {
  const std::lock_guard<std::mutex> leaving(leave_mutex_);
  if (!thread_.joinable()) return Status();
  bool interrupt = false;
  const Status why(StatusCode::kShutDown, "this rank has shut down");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!end_) end_ = why;
    // Without operations in flight, the thread waits for no peer. Peers that are still busy with an
    // operation that has ended here must not be disturbed.
    interrupt = !in_flight_.empty();
  }
  wake_.notify_one();
  if (interrupt) AbortMesh(mesh_, why);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!finished_changed_.wait_until(lock, deadline.at(), [this] { return finished_; })) {
      return Status(StatusCode::kTimeout, "the engine has not ended yet");
    }
  }
  thread_.join();
  {
    // No direct call can begin any more. A waiting one is aborted.
    std::unique_lock<std::mutex> turn(direct_mutex_, std::try_to_lock);
    if (!turn.owns_lock()) {
      mesh_.direct_arena->Abort(why);
      turn.lock();
    }
  }
  mesh_.direct_arena.reset();
  mesh_.arena.reset();  // peers that still need this rank notice now
  mesh_.transport.reset();
  return Status();
}

void Engine::Main() {
  pthread_setname_np(pthread_self(), "shvd-engine");
  sigset_t all;  // the program's own threads handle signals
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  if (config_.processor_core) {
    if (const Status pinned = PinThisThread(*config_.processor_core); !pinned.ok())
      EndTogether(pinned);
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (AwaitWork(lock)) {
      driven_ = true;
      lock.unlock();
      RunCycle(Deadline::Never());
      lock.lock();
      driven_ = false;
    }
  }
  FailEverything();
  static_cast<void>(Guarded([this] {
    LeaveDevices();
    return Status();
  }));
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_ = true;
  finished_changed_.notify_all();
}

// Returns true once this thread has a cycle to run, and false once the engine has ended and no
// thread drives a cycle.
bool Engine::AwaitWork(std::unique_lock<std::mutex>& lock) {
  while (true) {
    if (!driven_ && !end_ && devices_.busy()) WatchDevice(lock);
    if (driven_) {
      wake_.wait(lock);
    } else if (end_) {
      return false;
    } else if (entered_) {
      return true;
    } else if (!queue_.empty()) {
      if (Clock::now() >= gathered_) return true;
      wake_.wait_until(lock, gathered_);
    } else if (pending_.empty()) {
      if (devices_.busy()) {
        wake_.wait_for(lock, kDeviceInterval);
      } else {
        wake_.wait(lock);
      }
    } else if (Clock::now() >= pause_end_) {
      return true;
    } else {
      wake_.wait_until(lock, pause_end_);
    }
  }
}

// Drives cycles until the operation is done or other ranks have to act first. Returns at once if
// another thread drives.
void Engine::DriveUntilDone(const Operation& operation, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (driven_) return;
  driven_ = true;
  bool progress = true;
  while (progress && !operation.done() && !end_) {
    lock.unlock();
    RunCycle(deadline);
    lock.lock();
    progress = !entered_ && pause_.count() == 0;
  }
  driven_ = false;
  // The engine's thread takes over the remaining work.
  if (end_ || !queue_.empty() || entered_ || !pending_.empty() || devices_.busy()) {
    wake_.notify_one();
  }
}

// Runs one cycle, or as much of it as `patience` allows if waiting can be interrupted. Every
// operation gets its outcome even when memory runs out: a failure must neither end the process nor
// leave a thread waiting.
void Engine::RunCycle(Deadline patience) noexcept {
  const Status status = Guarded([&] {
    if (!entered_) SHVD_TRY(EnterCycle());
    return ConcludeCycle(patience);
  });
  if (!status.ok()) EndTogether(status);
}

Status Engine::EnterCycle() {
  std::vector<OperationPointer> submitted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    submitted = std::exchange(queue_, {});
    queued_bytes_ = 0;
    gathering_ = false;
  }
  std::vector<const Request*> requests;
  requests.reserve(submitted.size());
  const auto now = Clock::now();
  Clock::duration queued{0};
  for (const OperationPointer& operation : submitted) {
    requests.push_back(&operation->request());
    pending_[operation->request().name] = operation;
    queued += now - operation->submitted();
  }
  counters_.queue_us += Microseconds(queued);
  EnterAll(submitted, Phase::kNegotiate);
  RequestMessage report = negotiation_->Report(requests);
  if (autotuner_) report.retuning = autotuner_->TakeRetuning();
  entered_ =
      Entered{Deadline::AfterSeconds(config_.collective_timeout_s), now, submitted.size(), false};
  counters_.cache_hits += report.cached.size();
  const Bytes room = negotiation_->Announce(report);
  if (report.requests.empty() &&
      execution_.MayDeposit({submitted.data(), submitted.size()}, room)) {
    std::vector<OperationPointer> in_order;
    for (const uint32_t id : report.cached) {
      in_order.push_back(pending_[negotiation_->cache().Own(id).name]);
    }
    execution_.Deposit({in_order.data(), in_order.size()}, room);
    entered_->deposited = true;
  }
  return negotiation_->Enter();
}

Status Engine::ConcludeCycle(Deadline patience) {
  const Result<Outcome> outcome =
      negotiation_->Conclude(Deadline::Earlier(patience, entered_->deadline));
  if (outcome.status().code() == StatusCode::kTimeout && patience.Expired() &&
      !entered_->deadline.Expired()) {
    return Status();  // the next thread to drive continues the wait
  }
  const Entered cycle = *std::exchange(entered_, std::nullopt);
  if (!outcome.ok()) return outcome.status().Annotate("pending here " + PendingTitles());
  ++counters_.cycles;
  counters_.negotiation_us += MicrosecondsSince(cycle.start);
  if (timeline_.on()) timeline_.MarkCycle();

  const auto& [response, beside] = outcome.value();
  const Result<std::vector<Ready>> ready = Resolve(response);
  SHVD_TRY(ready.status());
  if (response.retuning) Retune(*response.retuning);
  if (autotuner_) ObserveForTuning(ready.value());
  const bool idle = cycle.submitted == 0 && response.cached.empty() && response.agreements.empty();
  pause_ =
      !idle ? std::chrono::microseconds{0} : std::clamp(2 * pause_, kShortestPause, kLongestPause);
  pause_end_ = Clock::now() + pause_;
  if (!cycle.deposited || !beside) return Execute(ready.value());
  CompleteDeposits(ready.value(), *beside);
  return Status();
}

// All ranks retune in the same cycle, before they run its operations.
void Engine::Retune(const Retuning& retuning) {
  execution_.Retune(retuning.tunables);
  if (autotuner_) autotuner_->Begin();
  if (retuning.last) autotuner_.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  tuning_ = retuning;
}

void Engine::ObserveForTuning(const std::vector<Ready>& ready) {
  std::vector<Autotuner::Piece> pieces;
  for (const Ready& entry : ready) {
    const Request& request = entry.operation->request();
    if (request.kind != OperationKind::kAllreduce) continue;
    pieces.push_back(Autotuner::Piece{request.name, entry.operation->bytes()});
  }
  autotuner_->Run(pieces, Clock::now());
}

Retuning Engine::tuning() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tuning_;
}

Result<std::vector<Ready>> Engine::Resolve(const ResponseMessage& response) {
  std::vector<Ready> ready;
  ResponseCache& cache = negotiation_->cache();
  for (const uint32_t id : response.cached) {
    OperationPointer operation = cache.Contains(id) ? TakePending(cache.Own(id).name) : nullptr;
    if (!operation) {
      return Status(StatusCode::kInternal, "the coordinator calls for operation " +
                                               std::to_string(id) + ", which is not pending here");
    }
    cache.Touch(id);
    ready.push_back(Ready{std::move(operation), cache.Rows(id)});
  }
  for (const Agreement& agreement : response.agreements) {
    Result<OperationPointer> operation = Accept(agreement);
    SHVD_TRY(operation.status());
    if (operation.value()) ready.push_back(Ready{std::move(operation).value(), agreement.rows});
  }
  return ready;
}

// Returns the operation to run, or null if there is none.
Result<Engine::OperationPointer> Engine::Accept(const Agreement& agreement) {
  OperationPointer operation = TakePending(agreement.name);
  if (agreement.code != StatusCode::kOk) {
    if (operation) Complete({&operation, 1}, Status(agreement.code, agreement.message));
    return OperationPointer();
  }
  if (operation) {
    // When some ranks have joined, an operation has different rows than with all ranks.
    if (!agreement.request && operation->request().kind != OperationKind::kJoin) {
      negotiation_->Remember(operation->request(), agreement.rows);
    }
    return operation;
  }
  if (agreement.request) return SubstituteFor(*agreement.request);
  return Status(StatusCode::kInternal, "the coordinator calls for operation '" + agreement.name +
                                           "', which is not pending here");
}

Status Engine::Execute(const std::vector<Ready>& ready) {
  std::vector<const Request*> requests;
  requests.reserve(ready.size());
  for (const Ready& entry : ready) requests.push_back(&entry.operation->request());
  if (timeline_.on()) {
    for (const Request* request : requests) timeline_.Enter(request->name, Phase::kWait);
  }
  Status failure;
  for (const std::vector<size_t>& positions :
       PlanFusion(requests, execution_.tunables().fusion_threshold)) {
    std::vector<OperationPointer> group;
    group.reserve(positions.size());
    for (const size_t position : positions) group.push_back(ready[position].operation);
    if (failure.ok()) {
      const auto start = Clock::now();
      const Deadline deadline = Deadline::AfterSeconds(config_.collective_timeout_s);
      if (group[0]->request().on_device) {
        failure = ExecuteOnDevice(ready, positions, deadline);
      } else {
        failure = Guarded([&] {
          return group.size() > 1 ? execution_.Allreduce({group.data(), group.size()}, deadline)
                                  : execution_.Run(*group[0], ready[positions[0]].rows, deadline);
        });
        if (group[0]->request().name == kShareDeviceName) devices_.ShareDevice();
      }
      counters_.collective_us += MicrosecondsSince(start);
      if (!failure.ok()) failure = FirstFailure(failure);
      if (group.size() > 1) ++counters_.fused_buffers;
    }
    Complete({group.data(), group.size()}, failure);
  }
  return failure;
}

void Engine::CompleteDeposits(const std::vector<Ready>& ready, const ArenaSteps::Round& round) {
  std::vector<OperationPointer> group;
  for (const Ready& entry : ready) group.push_back(entry.operation);
  execution_.CombineDeposits({group.data(), group.size()}, round);
  if (group.size() > 1) ++counters_.fused_buffers;
  Complete({group.data(), group.size()}, Status());
}

Engine::OperationPointer Engine::TakePending(std::string_view name) {
  const auto found = pending_.find(name);
  if (found == pending_.end()) return nullptr;
  OperationPointer operation = std::move(found->second);
  pending_.erase(found);
  return operation;
}

void Engine::Complete(Span<const OperationPointer> operations, const Status& status) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const OperationPointer& operation : operations) {
      in_flight_.erase(operation->request().name);
      if (operation->request().kind == OperationKind::kJoin) joined_ = false;
    }
  }
  if (status.ok() && !operations.empty()) {
    size_t bytes = 0;
    for (const OperationPointer& operation : operations) bytes += operation->bytes();
    CountOperations(operations[0]->request().kind, operations.size(), bytes);
  }
  const Status labelled =
      config_.label.empty() ? Status() : AnnotateIfPossible(status, config_.label);
  for (const OperationPointer& operation : operations) {
    if (timeline_.on()) {
      static_cast<void>(Guarded([&] {
        timeline_.End(operation->request().name, status.message());
        return Status();
      }));
    }
    operation->Complete(config_.label.empty() ? status : labelled);
  }
}

void Engine::CountOperations(OperationKind kind, size_t number, size_t bytes) {
  counters_.operations += number;
  counters_.bytes += bytes;
  KindCounters& of_kind = counters_.OfKind(kind);
  of_kind.operations += number;
  of_kind.bytes += bytes;
}

void Engine::EnterAll(const std::vector<OperationPointer>& operations, Phase phase) {
  if (!timeline_.on()) return;
  for (const OperationPointer& operation : operations) {
    timeline_.Enter(operation->request().name, phase);
  }
}

// Ends all ranks with the failure that came first.
void Engine::EndTogether(const Status& own) noexcept { End(FirstFailure(own)); }

void Engine::End(const Status& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!end_) end_ = AnnotateIfPossible(why, "");
  }
  wake_.notify_one();
  AbortMesh(mesh_, why);
}

void Engine::FailEverything() noexcept {
  pending_.clear();
  while (true) {
    OperationPointer operation;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.clear();
      if (in_flight_.empty()) return;
      operation = in_flight_.begin()->second;
    }
    Complete({&operation, 1}, *end_);  // end_ no longer changes
  }
}

Status Engine::FirstFailure(const Status& own) noexcept {
  Status first;
  const Status asked = Guarded([&] {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (end_) {
        first = *end_;
        return Status();
      }
    }
    first = board_.First(own, rank_);
    return Status();
  });
  if (!asked.ok()) return AnnotateIfPossible(own, "");
  return first;  // moved: a copy may need memory
}

std::string Engine::PendingTitles() const {
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
