// Runs operations that all ranks agreed on.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/alltoall.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "collectives/reduction.h"
#include "collectives/select.h"
#include "scheduler/autotuner.h"
#include "scheduler/counters.h"
#include "scheduler/operation.h"
#include "scheduler/tunables.h"
#include "timeline/timeline.h"
#include "transport/mesh.h"

namespace sparkhvd {

using Operations = Span<const std::shared_ptr<Operation>>;

// Runs one rank's operations. Holds its links and the working memory that outlives an operation.
class Execution {
 public:
  // `steps` belongs to the mesh's arena and is null without one.
  Execution(Mesh& mesh, ArenaSteps* steps, const Tunables& tunables, bool hierarchical_allgather,
            EngineTimeline& timeline, Counters& counters);

  const Tunables& tunables() const { return tunables_; }

  // Call it between two cycles, the same two on all ranks.
  void Retune(const Tunables& tunables);

  // Returns the settings that can be tuned.
  TuningScope tuning_scope() const;

  // Runs one allreduce over all the operations together. They have the same reduction.
  Status Allreduce(Operations group, Deadline deadline);

  // Returns whether these are allreduces whose contributions fit into `room`, next to a message of
  // the negotiation. The result is the same on all ranks.
  bool MayDeposit(Operations group, Bytes room) const;

  // Copies this rank's contributions to `room`.
  void Deposit(Operations group, Bytes room) const;

  // Completes deposited allreduces from the contributions of all ranks. `phase` is the name of this
  // step in the timeline.
  void CombineDeposits(Operations group, const ArenaSteps::Round& round,
                       Phase phase = Phase::kCollective) const;

  // Runs an operation of any kind. `rows` comes from the agreement.
  Status Run(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline);

  // Copies the root's bytes to all ranks. On the root, the target may be the source.
  Status Broadcast(int root, const std::byte* source, Bytes target, Deadline deadline);

  // Sends every rank the number of this rank's rows for it. Returns the numbers of rows for this
  // rank, by sender.
  Result<std::vector<int64_t>> ExchangeRows(const std::vector<int64_t>& splits, Deadline deadline);

  // Sets `number` to the highest value of all ranks.
  Status Highest(int64_t* number, Deadline deadline);

 private:
  Status Reduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                Span<const size_t> lengths, Deadline deadline);
  bool GoThroughSlots(Operations group) const;
  Status AllreduceInSlots(Operations group, Deadline deadline);
  Status AllreduceInBuffer(Operations group, Deadline deadline);
  Status ReduceAlone(const Operation& operation, Deadline deadline);
  Status Gather(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline);
  Status Exchange(Operation& operation, Deadline deadline);
  Status Exchange(const RowsToSend& own, const RowsTarget& target_of, Deadline deadline);
  Status ReduceScatter(const Operation& operation, Deadline deadline);
  void Enter(const Operation& operation, Phase phase) const;

  Transport& transport_;
  ArenaSteps* const steps_;
  EngineTimeline& timeline_;
  Counters& counters_;
  const Hierarchy hierarchy_;
  const Topology topology_;
  const Algorithm algorithm_;  // for all other operations
  const Algorithm gathering_;  // for allgathers
  Tunables tunables_;
  Algorithm reducing_;              // for allreduces
  std::vector<std::byte> scratch_;  // working memory of the algorithms over links
  std::vector<std::byte> fused_;    // the fusion buffer
};

}  // namespace sparkhvd
