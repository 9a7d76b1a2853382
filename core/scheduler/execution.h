// Carries out operations that all ranks agreed on.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
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

// One rank's hands: the links, and working memory that outlives a single operation.
class Execution {
 public:
  // `steps` are those of the mesh's arena, null without one.
  Execution(Mesh& mesh, ArenaSteps* steps, const Tunables& tunables, bool hierarchical_allgather,
            EngineTimeline& timeline, Counters& counters);

  const Tunables& tunables() const { return tunables_; }

  // Between two cycles, in the same one on all ranks.
  void Retune(const Tunables& tunables);

  // What there is to tune.
  TuningScope tuning_scope() const;

  // Runs one allreduce over all the operations together. They compute the same.
  Status Allreduce(Operations group, Deadline deadline);

  // Whether these are allreduces of which the contributions of a rank are small enough for `room`,
  // beside a message of the negotiation. All ranks come to the same answer.
  bool MayDeposit(Operations group, Bytes room) const;

  // Puts this rank's contributions there.
  void Deposit(Operations group, Bytes room) const;

  // Completes such an allreduce from what all ranks have put there. `phase` is how the timeline
  // calls that.
  void CombineDeposits(Operations group, const ArenaSteps::Round& round,
                       Phase phase = Phase::kCollective) const;

  // Runs an operation of any kind; `rows` is what the agreement says.
  Status Run(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline);

  // Gives all ranks the bytes of one. On the root the target may be the source.
  Status Broadcast(int root, const std::byte* source, Bytes target, Deadline deadline);

  // Gives all ranks the highest number of any.
  Status Highest(int64_t* number, Deadline deadline);

 private:
  Status Reduce(const Reduction& reduction, const std::byte* source, std::byte* target,
                Span<const size_t> lengths, Deadline deadline);
  bool GoThroughSlots(Operations group) const;
  Status AllreduceInSlots(Operations group, Deadline deadline);
  Status AllreduceInBuffer(Operations group, Deadline deadline);
  Status ReduceAlone(const Operation& operation, Deadline deadline);
  Status Gather(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline);
  Status Exchange(Operation& operation, const std::vector<int64_t>& rows, Deadline deadline);
  Status ReduceScatter(const Operation& operation, Deadline deadline);
  void Enter(const Operation& operation, Phase phase) const;

  Transport& transport_;
  ArenaSteps* const steps_;
  EngineTimeline& timeline_;
  Counters& counters_;
  const Hierarchy hierarchy_;
  const Topology topology_;
  const Algorithm algorithm_;  // of whatever has no algorithm of its own
  const Algorithm gathering_;  // of allgathers
  Tunables tunables_;
  Algorithm reducing_;              // of allreduces
  std::vector<std::byte> scratch_;  // of the ring
  std::vector<std::byte> fused_;    // where small tensors travel together
};

}  // namespace sparkhvd
