#include "scheduler/engine.h"

#include <algorithm>
#include <utility>

namespace sparkhvd {
namespace {

// Limits fusion if all ranks share memory. Fused data is copied, and for more than a few ranks
// copied twice. That soon costs more than the steps it saves, and larger buffers leave the cache
// between the copies.
constexpr size_t kFusionInMemory = size_t{1} << 20;

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
    : mesh_(std::move(mesh)),
      rank_(mesh_.transport->rank()),
      size_(mesh_.transport->size()),
      local_ranks_(LocalRanks(mesh_)),
      host_ranks_(mesh_.host_ranks),
      collective_timeout_s_(config.collective_timeout_s),
      timeline_(config.timeline, config.timeline_label),
      steps_(StepsOf(mesh_)),
      negotiation_(MakeNegotiation(steps_ ? &*steps_ : nullptr, *mesh_.transport, config)),
      execution_(mesh_, steps_ ? &*steps_ : nullptr, StartOf(config, mesh_),
                 config.hierarchical_allgather, timeline_, counters_),
      devices_(config.device_libraries, rank_, size_, config.label, config.shares_device),
      direct_calls_(DirectCallsOf(mesh_)),
      queue_(negotiation_->interruptible(), timeline_),
      lifecycle_(std::move(board), rank_, queue_,
                 {[this](const Status& why) { AbortMesh(mesh_, why); }, [this] { CloseLinks(); }}),
      dispatcher_({queue_, lifecycle_, execution_, devices_, timeline_, counters_}, rank_, size_,
                  config.label, config.collective_timeout_s),
      cycle_({queue_, *negotiation_, execution_, dispatcher_, timeline_, counters_},
             AutotunerOf(rank_, config, execution_),
             Retuning{execution_.tunables(), !config.autotune.has_value()},
             config.collective_timeout_s),
      driver_({queue_, lifecycle_, cycle_, dispatcher_}, negotiation_->interruptible()) {
  lifecycle_.Start(config.processor_core, [this] { driver_.RunUntilEnd(); });
}

Engine::~Engine() { static_cast<void>(Shutdown(Deadline::Never())); }

Result<std::shared_ptr<const MemberWatches>> Engine::Neighbors(
    const std::vector<int>& ranks) const {
  std::vector<int> members;
  for (const int rank : ranks) {
    const auto found = std::find(local_ranks_.begin(), local_ranks_.end(), rank);
    if (found == local_ranks_.end()) return std::shared_ptr<const MemberWatches>();
    members.push_back(static_cast<int>(found - local_ranks_.begin()));
  }
  const std::shared_ptr<const MemberWatches> watches = mesh_.watches.lock();
  if (!watches) return Status(StatusCode::kShutDown, "this rank has shut down");
  return watches->Of(members);
}

Result<std::shared_ptr<Operation>> Engine::Submit(Request request, const std::byte* source,
                                                  std::byte* target, Start start,
                                                  const std::optional<DeviceStream>& device) {
  std::optional<Mark> mark;
  Result<OperationPointer> operation =
      Make(Submission{std::move(request), source, target, device}, mark);
  SHVD_TRY(operation.status());
  SHVD_TRY(queue_.Push(Span<const OperationPointer>(&operation.value(), 1), start));
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
  SHVD_TRY(queue_.Push(Span<const OperationPointer>(operations.data(), operations.size()), start));
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

Status Engine::AllreduceNow(const Reduction& reduction, const std::byte* source, std::byte* target,
                            size_t count, const std::function<bool()>& interrupted) {
  if (direct_caller_ == std::this_thread::get_id()) {
    return Status(StatusCode::kInvalidArgument,
                  "a signal handler cannot call allreduce_now() while its thread waits in "
                  "allreduce_now(); use allreduce()");
  }
  const std::lock_guard<std::mutex> turn(direct_mutex_);
  SHVD_TRY(lifecycle_.Reason());
  direct_caller_ = std::this_thread::get_id();
  const Status status = direct_calls_->Allreduce(
      reduction, source, target, count, Deadline::AfterSeconds(collective_timeout_s_), interrupted);
  direct_caller_ = std::thread::id();
  if (status.ok()) {
    counters_.Add(OperationKind::kAllreduce, 1, count * SizeOf(reduction.dtype));
  } else if (status.code() != StatusCode::kMismatch) {
    const Status why = lifecycle_.FirstFailure(status.Annotate("direct allreduce"));
    lifecycle_.End(why);
    return why;
  }
  return status;
}

void Engine::CloseLinks() {
  if (direct_caller_ == std::this_thread::get_id()) {
    // A signal handler shuts down during a direct call of its own thread. The call ends after the
    // handler and still uses the links, so they close with the engine.
    return AbortMesh(mesh_, Status(StatusCode::kShutDown, "this rank has shut down"));
  }
  {
    // No direct call can begin any more. A waiting call is aborted.
    std::unique_lock<std::mutex> turn(direct_mutex_, std::try_to_lock);
    if (!turn.owns_lock()) {
      mesh_.direct_arena->Abort(Status(StatusCode::kShutDown, "this rank has shut down"));
      turn.lock();
    }
  }
  mesh_.direct_arena.reset();
  mesh_.arena.reset();  // peers that still need this rank notice now
  mesh_.transport.reset();
}

}  // namespace sparkhvd
