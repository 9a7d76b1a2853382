#include "scheduler/execution.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>

#include "collectives/allgather.h"
#include "collectives/allreduce_ring.h"
#include "collectives/allreduce_shm.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/combine_slots.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

Reduction ReductionOf(const Request& request) {
  return Reduction{request.dtype, request.op, request.prescale, request.postscale};
}

void CopyBytes(std::byte* target, const std::byte* source, size_t length) {
  if (length > 0 && target != source) std::memcpy(target, source, length);
}

// How many bytes every rank contributes to an allgather; nothing when all together are too many.
std::optional<std::vector<size_t>> ContributedBytes(const Request& request,
                                                    const std::vector<int64_t>& first_dims) {
  std::vector<int64_t> row = request.shape;
  row[0] = 1;
  const size_t row_bytes = ElementCount(row).value_or(0) * SizeOf(request.dtype);
  std::vector<size_t> lengths;
  size_t total = 0;
  for (const int64_t dimension : first_dims) {
    const auto rows = static_cast<size_t>(dimension);
    constexpr size_t kLimit = std::numeric_limits<ptrdiff_t>::max();
    if (dimension < 0 || (row_bytes > 0 && rows > (kLimit - total) / row_bytes)) {
      return std::nullopt;
    }
    lengths.push_back(rows * row_bytes);
    total += rows * row_bytes;
  }
  return lengths;
}

}  // namespace

Execution::Execution(Transport& transport, ArenaSteps* steps, Timeline& timeline,
                     Counters& counters)
    : transport_(transport), steps_(steps), timeline_(timeline), counters_(counters) {
  Topology topology;
  topology.size = transport_.size();
  if (steps_ != nullptr) topology.arena_members = steps_->count();
  algorithm_ = Select(topology);
}

void Execution::Enter(const Operation& operation, Phase phase) const {
  if (timeline_.on()) timeline_.Enter(operation.request().name, phase);
}

bool Execution::Deposit(const std::vector<std::shared_ptr<Operation>>& group, Bytes room) const {
  if (algorithm_ != Algorithm::kArena) return false;
  const size_t limit = std::min(room.size(), SmallAllreduceBytes(*steps_));
  size_t total = 0;
  for (const auto& operation : group) {
    if (operation->request().kind != OperationKind::kAllreduce) return false;
    total += operation->bytes();
    if (total > limit) return false;
  }
  std::byte* target = room.data();
  for (const auto& operation : group) {
    CopyPrescaled(ReductionOf(operation->request()), target, operation->source(),
                  operation->count());
    target += operation->bytes();
  }
  return true;
}

void Execution::CombineDeposits(const std::vector<std::shared_ptr<Operation>>& group,
                                const ArenaSteps::Round& round) const {
  size_t offset = 0;
  for (const auto& operation : group) {
    Enter(*operation, Phase::kCollective);
    CombineSlots(*steps_, round.Behind(offset), ReductionOf(operation->request()),
                 operation->target(), Slice{0, operation->count()});
    offset += operation->bytes();
  }
}

Status Execution::Reduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                         size_t count, Deadline deadline) {
  switch (algorithm_) {
    case Algorithm::kLocal:
      CopyPrescaled(reduction, target, source, count);
      Finish(reduction, 1, target, count);
      return Status();
    case Algorithm::kArena:
      return AllreduceShm(*steps_, reduction, source, target, count, deadline);
    case Algorithm::kTransport:
      return AllreduceRing(transport_, reduction, source, target, count, scratch_, deadline);
  }
  return Status(StatusCode::kInternal, "no algorithm");
}

Status Execution::Allreduce(const std::vector<std::shared_ptr<Operation>>& group,
                            Deadline deadline) {
  if (group.size() == 1) {
    const Operation& only = *group.front();
    Enter(only, Phase::kCollective);
    return Reduce(ReductionOf(only.request()), only.source(), only.target(), only.count(),
                  deadline);
  }
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
  Reduction reduction = ReductionOf(group.front()->request());
  reduction.prescale = 1.0;  // done while the buffer was filled
  SHVD_TRY(
      Reduce(reduction, fused_.data(), fused_.data(), total / SizeOf(reduction.dtype), deadline));
  const auto reduced = Deadline::Clock::now();
  offset = 0;
  for (const auto& operation : group) {
    Enter(*operation, Phase::kCopyOut);
    CopyBytes(operation->target(), fused_.data() + offset, operation->bytes());
    offset += operation->bytes();
  }
  const auto copying = (filled - start) + (Deadline::Clock::now() - reduced);
  counters_.fusion_copy_us +=
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(copying).count());
  return Status();
}

Status Execution::Run(Operation& operation, const std::vector<int64_t>& first_dims,
                      Deadline deadline) {
  Enter(operation, Phase::kCollective);
  switch (operation.request().kind) {
    case OperationKind::kAllreduce:
      return Reduce(ReductionOf(operation.request()), operation.source(), operation.target(),
                    operation.count(), deadline);
    case OperationKind::kAllgather:
      return Gather(operation, first_dims, deadline);
    case OperationKind::kBroadcast:
      return Broadcast(operation, deadline);
    case OperationKind::kBarrier:
      return algorithm_ == Algorithm::kLocal   ? Status()
             : algorithm_ == Algorithm::kArena ? steps_->ArriveAndAwaitAll(deadline)
                                               : Barrier(transport_, deadline);
  }
  return Status(StatusCode::kInternal, "no such operation");
}

Status Execution::Gather(Operation& operation, const std::vector<int64_t>& first_dims,
                         Deadline deadline) {
  const auto lengths = ContributedBytes(operation.request(), first_dims);
  if (!lengths) {
    return Status(StatusCode::kInvalidArgument, "the ranks together contribute too many elements");
  }
  size_t total = 0;
  for (const size_t length : *lengths) total += length;
  std::unique_ptr<std::byte[]> output(new (std::nothrow) std::byte[total]);
  if (!output) {
    return Status(StatusCode::kIo, "no memory for " + std::to_string(total) + " gathered bytes");
  }
  const ConstBytes source(operation.source(), operation.bytes());
  const Bytes target(output.get(), total);
  Status status;
  if (algorithm_ == Algorithm::kLocal) {
    CopyBytes(target.data(), source.data(), source.size());
  } else if (algorithm_ == Algorithm::kArena) {
    status = AllgatherShm(*steps_, source, *lengths, target, deadline);
  } else {
    status = AllgatherRing(transport_, source, *lengths, target, deadline);
  }
  SHVD_TRY(status);
  operation.SetOutput(std::move(output), total, first_dims);
  return Status();
}

Status Execution::Broadcast(const Operation& operation, Deadline deadline) {
  const int root = operation.request().root;
  const Bytes target(operation.target(), operation.bytes());
  switch (algorithm_) {
    case Algorithm::kLocal:
      CopyBytes(target.data(), operation.source(), target.size());
      return Status();
    case Algorithm::kArena:
      return BroadcastShm(*steps_, root, operation.source(), target, deadline);
    case Algorithm::kTransport:
      return BroadcastTree(transport_, root, operation.source(), target, deadline);
  }
  return Status(StatusCode::kInternal, "no algorithm");
}

}  // namespace sparkhvd
