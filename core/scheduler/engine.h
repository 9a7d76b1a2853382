// The engine of one rank: a queue of named operations, and the thread that negotiates and runs
// them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "scheduler/autotuner.h"
#include "scheduler/counters.h"
#include "scheduler/device_execution.h"
#include "scheduler/direct_calls.h"
#include "scheduler/execution.h"
#include "scheduler/failure_board.h"
#include "scheduler/negotiation.h"
#include "scheduler/operation.h"
#include "scheduler/tunables.h"
#include "timeline/timeline.h"
#include "transport/mesh.h"

namespace sparkhvd {

struct EngineConfig {
  // Prefixes failure messages. Empty if this engine serves the whole job.
  std::string label;
  // A value that is set stays. Otherwise the default depends on the links, and the autotuner may
  // change it.
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

// A barrier with this name announces that other engines use the ranks' devices from then on.
inline constexpr const char* kShareDeviceName = "devices.share";

// When an operation starts.
enum class Start {
  kNow,        // at once, on the engine's thread
  kWithWaiter  // on the thread that waits for it, or with the next kNow
};

// Ranks run cycles in lockstep. A rank enters a cycle as soon as it has submitted an operation or
// waits for one. The cycle lasts until all ranks have entered it, so no rank waits for a tick, and
// an idle job costs nothing. A cycle makes no progress if every rank waits for operations that
// others have not submitted yet. The next cycle is then delayed by up to kLongestPause, or until an
// operation is submitted here.
//
// One thread at a time drives the cycle. The engine's own thread does so when there is work and no
// other thread drives. A thread that waits for an operation drives while it waits, because handing
// a small operation to another thread and back takes longer than the operation. Operations without
// a waiter are gathered for up to kGathering, so that the tensors of a burst travel together and
// the engine's thread does not compete with the submitting thread.
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

  // Returns the settings in force on all ranks and whether they may still change.
  Retuning tuning() const;

  // The caller keeps the buffers alive until the operation is settled. With `device`, the buffers
  // are in device memory; a join uses the device for the other ranks' tensors. Fails with
  // kInvalidArgument for an invalid request or a name that is already in flight, and with the
  // engine's failure once it has one.
  Result<std::shared_ptr<Operation>> Submit(Request request, const std::byte* source,
                                            std::byte* target, Start start = Start::kNow,
                                            const std::optional<DeviceStream>& device = {});

  // Waits for the outcome of an operation of this engine. At the deadline, fails with kTimeout and
  // the tensor's name; the operation continues.
  Status Wait(Operation& operation, Deadline deadline);

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
  void StartNow();

  // Returns whether AllreduceNow works: all ranks of the job must share memory.
  bool has_direct_calls() const { return direct_calls_.has_value(); }

  // Runs an allreduce without a name and without negotiation on the calling thread. Every rank must
  // make the same calls in the same order. It may run beside all other work of the engine. Polls
  // `interrupted` during a wait. An interrupted call ends the engine. So does every failure except
  // kMismatch and kInvalidArgument.
  Status AllreduceNow(const Reduction& reduction, const std::byte* source, std::byte* target,
                      size_t count, const std::function<bool()>& interrupted);

  // Returns why this engine has ended. OK while it runs and after an orderly Shutdown. An operation
  // that is done may still fail on its device.
  Status Failure() const;

  // Ends every pending and future operation with kAborted, here and on all peers.
  void Abort(const std::string& why);

  // Leaves the job: pending operations fail with kShutDown. May be called again.
  Status Shutdown(Deadline deadline);

  // Closes a forked child's copies of the links. A child may call nothing else.
  void CloseCopies() const { mesh_.sockets.CloseCopies(); }

 private:
  using OperationPointer = std::shared_ptr<Operation>;

  // A cycle that this rank has entered and not concluded.
  struct Entered {
    Deadline deadline;
    Deadline::Clock::time_point start;
    size_t submitted = 0;
    bool deposited = false;
  };

  void Main();
  bool AwaitWork(std::unique_lock<std::mutex>& lock);
  void DriveUntilDone(const Operation& operation, Deadline deadline);
  void RunCycle(Deadline patience) noexcept;
  Status EnterCycle();
  Status ConcludeCycle(Deadline patience);
  void Retune(const Retuning& retuning);
  void ObserveForTuning(const std::vector<Ready>& ready);
  Result<std::vector<Ready>> Resolve(const ResponseMessage& response);
  Status Execute(const std::vector<Ready>& ready);
  Status ExecuteOnDevice(const std::vector<Ready>& ready, const std::vector<size_t>& positions,
                         Deadline deadline);
  void WatchDevice(std::unique_lock<std::mutex>& lock);
  Status CheckForFailure();
  void LeaveDevices();
  void CompleteDeposits(const std::vector<Ready>& ready, const ArenaSteps::Round& round);
  // The point at which operations submitted together on one stream are ready.
  struct Mark {
    DeviceStream submitter;
    std::shared_ptr<const DeviceEvent> point;
  };
  Result<OperationPointer> Make(Submission submission, std::optional<Mark>& mark);
  Status Enqueue(Span<const OperationPointer> operations, Start start);  // all or none
  Status TakeIn(Span<const OperationPointer> operations);                // requires mutex_
  Status Refusal(const Request& request) const;                          // requires mutex_
  Result<OperationPointer> Accept(const Agreement& agreement);
  OperationPointer TakePending(std::string_view name);
  // The operations are of one kind if they succeeded.
  void Complete(Span<const OperationPointer> operations, const Status& status) noexcept;
  void CountOperations(OperationKind kind, size_t number, size_t bytes);
  void EnterAll(const std::vector<OperationPointer>& operations, Phase phase);
  void EndTogether(const Status& own) noexcept;
  void End(const Status& why) noexcept;
  void FailEverything() noexcept;
  Status FirstFailure(const Status& own) noexcept;
  void StopGathering();
  std::string PendingTitles() const;

  const EngineConfig config_;
  // Empty once the engine has left. It changes under leave_mutex_ after the thread has ended.
  Mesh mesh_;
  const FailureBoard board_;
  const int rank_;
  const int size_;
  std::vector<int> local_ranks_;
  std::vector<int> host_ranks_;
  Counters counters_;
  EngineTimeline timeline_;

  // Only the thread that drives the cycle uses the fields below. Threads hand them over under
  // mutex_.
  std::optional<ArenaSteps> steps_;  // set if there is an arena
  std::unique_ptr<Negotiation> negotiation_;
  Execution execution_;
  DeviceExecution devices_;  // some functions serve any thread
  std::unique_ptr<Will> will_;
  Deadline::Clock::time_point next_check_{};                        // when to poll the board next
  std::unique_ptr<Autotuner> autotuner_;                            // on rank 0 during the search
  std::unordered_map<std::string_view, OperationPointer> pending_;  // by name
  std::optional<Entered> entered_;
  std::chrono::microseconds pause_{0};
  Deadline::Clock::time_point pause_end_{};

  mutable std::mutex mutex_;      // guards the fields below; taken before an Operation's mutex
  std::condition_variable wake_;  // wakes the engine's thread
  std::condition_variable finished_changed_;
  bool driven_ = false;  // whether a thread drives the cycle
  std::vector<OperationPointer> queue_;
  // Queued, pending and running operations by name, so that every failure reaches them all.
  std::unordered_map<std::string_view, OperationPointer> in_flight_;
  size_t queued_bytes_ = 0;
  bool gathering_ = false;  // the engine's thread takes the queue at gathered_
  Deadline::Clock::time_point gathered_{};
  bool joined_ = false;  // whether a join is in flight
  Retuning tuning_;
  std::optional<Status> end_;  // why the engine accepts no more operations
  bool finished_ = false;

  std::mutex direct_mutex_;  // one direct call at a time; taken before mutex_
  std::optional<DirectCalls> direct_calls_;

  std::mutex leave_mutex_;  // one Shutdown or Abort at a time; taken before the others
  std::thread thread_;
};

}  // namespace sparkhvd
