#include "scheduler/execution.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

#include "base/copy.h"
#include "collectives/adasum.h"
#include "collectives/allgather.h"
#include "collectives/allgather_hierarchical.h"
#include "collectives/allreduce_hierarchical.h"
#include "collectives/allreduce_links.h"
#include "collectives/allreduce_shm.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/broadcast_hierarchical.h"
#include "collectives/combine_slots.h"
#include "collectives/kernels.h"
#include "collectives/reducescatter.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// Up to this many ranks, reading all contributions on every rank costs less than sharing the work
// and copying every tensor into and out of a buffer.
constexpr int kMostRanksInSlots = 4;

Reduction ReductionOf(const Request& request) {
  return Reduction{request.dtype, request.op, request.prescale, request.postscale};
}

Topology TopologyOf(const Mesh& mesh) {
  return Topology{mesh.transport->size(), static_cast<int>(mesh.memory_groups.size())};
}

Result<std::unique_ptr<std::byte[]>> Allocate(size_t bytes) {
  std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[bytes]);
  if (!memory) {
    return Status(StatusCode::kIo,
                  "cannot allocate " + std::to_string(bytes) + " bytes for the data of all ranks");
  }
  return memory;
}

}  // namespace

Execution::Execution(Mesh& mesh, ArenaSteps* steps, const Tunables& tunables,
                     bool hierarchical_allgather, EngineTimeline& timeline, Counters& counters)
    : transport_(*mesh.transport),
      steps_(steps),
      timeline_(timeline),
      counters_(counters),
      hierarchy_(mesh.memory_groups, transport_.rank()),
      topology_(TopologyOf(mesh)),
      algorithm_(Select(topology_)),
      gathering_(Select(topology_, hierarchical_allgather)),
      tunables_(tunables),
      reducing_(Select(topology_, tunables.hierarchical)) {}

void Execution::Retune(const Tunables& tunables) {
  tunables_ = tunables;
  reducing_ = Select(topology_, tunables.hierarchical);
}

TuningScope Execution::tuning_scope() const {
  TuningScope scope;
  scope.fusion = algorithm_ != Algorithm::kLocal;
  if (algorithm_ == Algorithm::kArena) scope.arena_slot_bytes = steps_->SlotBytes();
  scope.hierarchical = Select(topology_, true) == Algorithm::kHierarchical;
  return scope;
}

void Execution::Enter(const Operation& operation, Phase phase) const {
  if (timeline_.on()) timeline_.Enter(operation.request().name, phase);
}

bool Execution::MayDeposit(Operations group, Bytes room) const {
  if (algorithm_ != Algorithm::kArena || group.empty()) return false;
  const size_t limit = std::min(room.size(), SmallAllreduceBytes(*steps_, tunables_.arena));
  size_t total = 0;
  for (const auto& operation : group) {
    const Request& request = operation->request();
    if (request.kind != OperationKind::kAllreduce || request.op == ReduceOp::kAdasum ||
        request.on_device) {
      return false;
    }
    total += operation->bytes();
    if (total > limit) return false;
  }
  return true;
}

void Execution::Deposit(Operations group, Bytes room) const {
  std::byte* target = room.data();
  for (const auto& operation : group) {
    CopyPrescaled(ReductionOf(operation->request()), target, operation->source(),
                  operation->count());
    target += operation->bytes();
  }
}

void Execution::CombineDeposits(Operations group, const ArenaSteps::Round& round,
                                Phase phase) const {
  size_t offset = 0;
  for (const auto& operation : group) {
    Enter(*operation, phase);
    CombineSlots(*steps_, round.Behind(offset), ReductionOf(operation->request()),
                 operation->target(), Slice{0, operation->count()});
    offset += operation->bytes();
  }
}

// Reduces consecutive tensors of `lengths` elements.
Status Execution::Reduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                         Span<const size_t> lengths, Deadline deadline) {
  const size_t count = std::accumulate(lengths.begin(), lengths.end(), size_t{0});
  if (reduction.op != ReduceOp::kAdasum) {
    switch (reducing_) {
      case Algorithm::kArena:
        return AllreduceShm(*steps_, reduction, source, target, count, deadline, tunables_.arena);
      case Algorithm::kTransport:
        return AllreduceLinks(transport_, reduction, source, target, count, scratch_, deadline);
      case Algorithm::kHierarchical:
        ++counters_.hierarchical;
        return AllreduceHierarchical(transport_, steps_, hierarchy_, reduction, source, target,
                                     count, scratch_, deadline);
      case Algorithm::kLocal:
        break;
    }
  }
  CopyPrescaled(reduction, target, source, count);
  if (reduction.op == ReduceOp::kAdasum) {
    SHVD_TRY(AdasumTree(transport_, reduction.dtype, lengths, target, deadline));
  }
  Finish(reduction, 1, target, count);
  return Status();
}

Status Execution::Highest(int64_t* number, Deadline deadline) {
  auto* bytes = reinterpret_cast<std::byte*>(number);
  const size_t one = 1;
  return Reduce(Reduction{DType::kInt64, ReduceOp::kMax}, bytes, bytes, Span<const size_t>(&one, 1),
                deadline);
}

Status Execution::ReduceAlone(const Operation& operation, Deadline deadline) {
  const size_t count = operation.count();
  return Reduce(ReductionOf(operation.request()), operation.source(), operation.target(),
                Span<const size_t>(&count, 1), deadline);
}

Status Execution::Allreduce(Operations group, Deadline deadline) {
  if (group.size() == 1) {
    const Operation& only = *group[0];
    Enter(only, Phase::kCollective);
    return ReduceAlone(only, deadline);
  }
  return GoThroughSlots(group) ? AllreduceInSlots(group, deadline)
                               : AllreduceInBuffer(group, deadline);
}

bool Execution::GoThroughSlots(Operations group) const {
  if (reducing_ != Algorithm::kArena || steps_->count() > kMostRanksInSlots) return false;
  if (group[0]->request().op == ReduceOp::kAdasum) return false;
  return std::all_of(group.begin(), group.end(), [this](const auto& operation) {
    return operation->bytes() <= steps_->SlotBytes();
  });
}

// Copies the tensors to the slots and combines them back into the tensors. Each round takes as many
// tensors as fit into a slot.
Status Execution::AllreduceInSlots(Operations group, Deadline deadline) {
  for (size_t begin = 0, end = 0; begin < group.size(); begin = end) {
    const auto start = Deadline::Clock::now();
    size_t bytes = 0;
    for (; end < group.size() && group[end]->bytes() <= steps_->SlotBytes() - bytes; ++end) {
      Enter(*group[end], Phase::kCopyIn);
      bytes += group[end]->bytes();
    }
    const Operations part = group.Sub(begin, end - begin);
    const ArenaSteps::Round round = steps_->StartRound();
    Deposit(part, Bytes(round.Slot(steps_->member()), bytes));
    for (const auto& operation : part) Enter(*operation, Phase::kCollective);
    counters_.fusion_copy_us += Microseconds(Deadline::Clock::now() - start);
    SHVD_TRY(steps_->ArriveAndAwaitAll(deadline));
    CombineDeposits(part, round, Phase::kCopyOut);
  }
  return Status();
}

// Fuses the tensors in this rank's own memory and reduces them as one long tensor.
Status Execution::AllreduceInBuffer(Operations group, Deadline deadline) {
  size_t total = 0;
  for (const auto& operation : group) total += operation->bytes();
  if (fused_.size() < total) fused_.resize(total);
  size_t offset = 0;
  const auto start = Deadline::Clock::now();
  for (const auto& operation : group) {
    Enter(*operation, Phase::kCopyIn);
    CopyPrescaled(ReductionOf(operation->request()), fused_.data() + offset, operation->source(),
                  operation->count());
    offset += operation->bytes();
  }
  const auto filled = Deadline::Clock::now();
  for (const auto& operation : group) Enter(*operation, Phase::kCollective);
  Reduction reduction = ReductionOf(group[0]->request());
  reduction.prescale = 1.0;  // already applied while filling the buffer
  std::vector<size_t> lengths;
  for (const auto& operation : group) lengths.push_back(operation->count());
  SHVD_TRY(Reduce(reduction, fused_.data(), fused_.data(),
                  Span<const size_t>(lengths.data(), lengths.size()), deadline));
  const auto reduced = Deadline::Clock::now();
  offset = 0;
  for (const auto& operation : group) {
    Enter(*operation, Phase::kCopyOut);
    CopyBytes(operation->target(), fused_.data() + offset, operation->bytes());
    offset += operation->bytes();
  }
  const auto copying = (filled - start) + (Deadline::Clock::now() - reduced);
  counters_.fusion_copy_us += Microseconds(copying);
  return Status();
}

Status Execution::Run(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline) {
  Enter(operation, Phase::kCollective);
  switch (operation.request().kind) {
    case OperationKind::kAllreduce:
      return ReduceAlone(operation, deadline);
    case OperationKind::kAllgather:
      return Gather(operation, rows, deadline);
    case OperationKind::kBroadcast:
      return Broadcast(operation.request().root, operation.source(),
                       Bytes(operation.target(), operation.bytes()), deadline);
    case OperationKind::kBarrier:
      return algorithm_ == Algorithm::kLocal   ? Status()
             : algorithm_ == Algorithm::kArena ? steps_->ArriveAndAwaitAll(deadline)
                                               : Barrier(transport_, deadline);
    case OperationKind::kAlltoall:
      return Exchange(operation, deadline);
    case OperationKind::kReducescatter:
      return ReduceScatter(operation, deadline);
    case OperationKind::kJoin:
      operation.SetOutput(nullptr, 0, rows);
      return Status();
  }
  return Status(StatusCode::kInternal, "unknown operation");
}

Status Execution::Gather(Operation& operation, const std::vector<int64_t>& rows,
                         Deadline deadline) {
  const auto lengths = BytesOf(operation.request(), rows, static_cast<size_t>(transport_.size()));
  SHVD_TRY(lengths.status());
  const size_t total = std::accumulate(lengths.value().begin(), lengths.value().end(), size_t{0});
  Result<std::unique_ptr<std::byte[]>> output = Allocate(total);
  SHVD_TRY(output.status());
  const ConstBytes source(operation.source(), operation.bytes());
  const Bytes target(output.value().get(), total);
  switch (gathering_) {
    case Algorithm::kLocal:
      CopyBytes(target.data(), source.data(), source.size());
      break;
    case Algorithm::kArena:
      SHVD_TRY(AllgatherShm(*steps_, source, lengths.value(), target, deadline));
      break;
    case Algorithm::kTransport:
      SHVD_TRY(AllgatherLinks(transport_, source, lengths.value(), target, deadline));
      break;
    case Algorithm::kHierarchical:
      ++counters_.hierarchical;
      SHVD_TRY(AllgatherHierarchical(transport_, steps_, hierarchy_, source, lengths.value(),
                                     target, deadline));
      break;
  }
  operation.SetOutput(std::move(output).value(), total, rows);
  return Status();
}

Result<std::vector<int64_t>> Execution::ExchangeRows(const std::vector<int64_t>& splits,
                                                     Deadline deadline) {
  std::vector<int64_t> received;
  const auto target_of = [&received](const std::vector<int64_t>& rows) -> Result<Bytes> {
    received = rows;
    return Bytes();
  };
  SHVD_TRY(Exchange(RowsToSend{ConstBytes(), splits, 0}, target_of, deadline));
  return received;
}

Status Execution::Exchange(const RowsToSend& own, const RowsTarget& target_of, Deadline deadline) {
  return algorithm_ == Algorithm::kArena
             ? AlltoallShm(*steps_, own, target_of, deadline)
             : AlltoallLinks(transport_, own, target_of, scratch_, deadline);
}

Status Execution::Exchange(Operation& operation, Deadline deadline) {
  const Request& request = operation.request();
  std::unique_ptr<std::byte[]> output;
  size_t total = 0;
  std::vector<int64_t> received;
  const auto target_of = [&](const std::vector<int64_t>& rows) -> Result<Bytes> {
    const auto lengths = BytesOf(request, rows, rows.size());
    SHVD_TRY(lengths.status());
    total = std::accumulate(lengths.value().begin(), lengths.value().end(), size_t{0});
    Result<std::unique_ptr<std::byte[]>> memory = Allocate(total);
    SHVD_TRY(memory.status());
    output = std::move(memory).value();
    received = rows;
    return Bytes(output.get(), total);
  };
  const ConstBytes source(operation.source(), operation.bytes());
  const size_t row_bytes = RowElements(request) * SizeOf(request.dtype);
  SHVD_TRY(Exchange(RowsToSend{source, request.splits, row_bytes}, target_of, deadline));
  operation.SetOutput(std::move(output), total, std::move(received));
  return Status();
}

Status Execution::ReduceScatter(const Operation& operation, Deadline deadline) {
  const Request& request = operation.request();
  const size_t row = RowElements(request);
  std::vector<Slice> slices = EvenSlices(static_cast<size_t>(request.shape[0]), transport_.size());
  for (Slice& slice : slices) slice = Slice{slice.begin * row, slice.count * row};
  const Reduction reduction = ReductionOf(request);
  return algorithm_ == Algorithm::kArena
             ? ReducescatterShm(*steps_, reduction, operation.source(), operation.target(), slices,
                                deadline)
             : ReducescatterLinks(transport_, reduction, operation.source(), operation.target(),
                                  slices, scratch_, deadline);
}

Status Execution::Broadcast(int root, const std::byte* source, Bytes target, Deadline deadline) {
  switch (Select(topology_, true)) {
    case Algorithm::kLocal:
      CopyBytes(target.data(), source, target.size());
      return Status();
    case Algorithm::kArena:
      return BroadcastShm(*steps_, root, source, target, deadline);
    case Algorithm::kTransport:
      return BroadcastLinks(transport_,
                            SelectBroadcast(transport_.size(), target.size(), transport_.costs()),
                            root, source, target, deadline);
    case Algorithm::kHierarchical:
      ++counters_.hierarchical;
      return BroadcastHierarchical(transport_, steps_, hierarchy_, root, source, target, deadline);
  }
  return Status(StatusCode::kInternal, "no algorithm");
}

}  // namespace sparkhvd
