// The engine of one rank: a queue of named operations, and the thread that negotiates and runs
// them.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "scheduler/autotuner.h"
#include "scheduler/counters.h"
#include "scheduler/cycle.h"
#include "scheduler/cycle_driver.h"
#include "scheduler/device_execution.h"
#include "scheduler/direct_calls.h"
#include "scheduler/dispatcher.h"
#include "scheduler/execution.h"
#include "scheduler/failure_board.h"
#include "scheduler/lifecycle.h"
#include "scheduler/negotiation.h"
#include "scheduler/operation.h"
#include "scheduler/submission_queue.h"
#include "scheduler/tunables.h"
#include "timeline/timeline.h"
#include "transport/mesh.h"

namespace sparkhvd {

struct EngineConfig {
  // Prefixes failure messages. Empty if this engine serves the whole job.
  std::string label;
  // If a value is set, the engine keeps it. If not, the default depends on the links, and the
  // autotuner may change the value.
  std::optional<size_t> fusion_threshold;
  std::optional<bool> hierarchical_allreduce;
  size_t cache_capacity = 1024;
  double collective_timeout_s = 1800.0;
  // Whether an allgather across several hosts uses the memory that the ranks of a host share.
  bool hierarchical_allgather = true;
  std::optional<AutotuneOptions> autotune;  // only rank 0's options are used
  std::optional<int> processor_core;        // pins the engine's thread; any core if empty
  std::shared_ptr<const DeviceLibraries> device_libraries;  // null: no operations on devices
  bool shares_device = false;          // other engines use the same devices; see kShareDeviceName
  std::shared_ptr<Timeline> timeline;  // another engine's timeline; null: its own
  std::string timeline_label;          // distinguishes this engine's tensors in a shared timeline
};

// Wires the parts of an engine. A submission goes to the SubmissionQueue. The CycleDriver decides
// which thread runs the next Cycle, in which the ranks agree on operations. The Dispatcher runs
// them. The Lifecycle ends all parts.
class Engine {
 public:
  Engine(const EngineConfig& config, Mesh mesh, FailureBoard board);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  const std::vector<int>& host_ranks() const { return host_ranks_; }
  const Counters& counters() const { return counters_; }
  const std::shared_ptr<Timeline>& timeline() const { return timeline_.shared(); }

  // Returns what the mesh of some of the ranks, which include this rank, needs to use the memory
  // that they share: null if they do not, equal on all of them. Fails once this rank has left.
  Result<std::shared_ptr<const MemberWatches>> Neighbors(const std::vector<int>& ranks) const;

  // Returns the settings in force on all ranks and whether they may still change.
  Retuning tuning() const { return cycle_.tuning(); }

  // The caller keeps the buffers alive until the operation is settled. With `device`, the buffers
  // are in device memory; a join uses the device for the other ranks' tensors. Fails with
  // kInvalidArgument for an invalid request or a name that is already in flight, and with the
  // engine's failure once it has one.
  Result<std::shared_ptr<Operation>> Submit(Request request, const std::byte* source,
                                            std::byte* target, Start start = Start::kNow,
                                            const std::optional<DeviceStream>& device = {});

  // Waits for the outcome of an operation of this engine. At the deadline, fails with kTimeout and
  // the tensor's name; the operation continues.
  Status Wait(Operation& operation, Deadline deadline) {
    return driver_.Await(operation, deadline);
  }

  // Submits all operations or none. Requests of one `group` must be submitted together.
  struct Submission {
    Request request;
    const std::byte* source;
    std::byte* target;
    std::optional<DeviceStream> device = {};
  };
  Result<std::vector<std::shared_ptr<Operation>>> SubmitAll(std::vector<Submission> submissions,
                                                            Start start = Start::kNow);

  // Starts operations that were submitted with kWithWaiter, without waiting for them.
  void StartNow() { queue_.StartNow(); }

  // Returns whether AllreduceNow works: all ranks of the job must share memory.
  bool has_direct_calls() const { return direct_calls_.has_value(); }

  // Runs an allreduce without a name and without negotiation on the calling thread. Every rank must
  // make the same calls in the same order. The call may run at the same time as all other work of
  // the engine. Polls `interrupted` during a wait. An interrupted call ends the engine. So does
  // every failure except kMismatch and kInvalidArgument.
  Status AllreduceNow(const Reduction& reduction, const std::byte* source, std::byte* target,
                      size_t count, const std::function<bool()>& interrupted);

  // Returns why this engine has ended. OK while it runs and after an orderly Shutdown. An operation
  // that is done may still fail on its device.
  Status Failure() const { return lifecycle_.Failure(); }

  // Ends every pending and future operation with kAborted, here and on all peers.
  void Abort(const std::string& why) { lifecycle_.Abort(why); }

  // Leaves the job: pending operations fail with kShutDown. May be called again.
  Status Shutdown(Deadline deadline) { return lifecycle_.Shutdown(deadline); }

  // Closes a forked child's copies of the links. A child may call no other function.
  void CloseCopies() const { mesh_.sockets.CloseCopies(); }

 private:
  using OperationPointer = std::shared_ptr<Operation>;

  // The point at which operations submitted together on one stream are ready.
  struct Mark {
    DeviceStream submitter;
    std::shared_ptr<const DeviceEvent> point;
  };
  Result<OperationPointer> Make(Submission submission, std::optional<Mark>& mark);
  void CloseLinks();

  Mesh mesh_;  // empty once the engine has left
  const int rank_;
  const int size_;
  const std::vector<int> local_ranks_;
  const std::vector<int> host_ranks_;
  const double collective_timeout_s_;
  Counters counters_;
  EngineTimeline timeline_;

  std::optional<ArenaSteps> steps_;  // set if there is an arena
  const std::unique_ptr<Negotiation> negotiation_;
  Execution execution_;
  DeviceExecution devices_;
  // One direct call at a time. Taken before all mutexes except leave_mutex_ of Lifecycle.
  std::mutex direct_mutex_;
  std::atomic<std::thread::id> direct_caller_{std::thread::id()};
  std::optional<DirectCalls> direct_calls_;
  SubmissionQueue queue_;
  Lifecycle lifecycle_;
  Dispatcher dispatcher_;
  Cycle cycle_;
  CycleDriver driver_;
};

}  // namespace sparkhvd
