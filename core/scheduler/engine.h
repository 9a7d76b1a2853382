// One rank of a job: a queue of named operations in, tickets out, and the thread that negotiates
// and runs them.
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
  // Stands in front of what is said about failures; empty where this engine serves the whole job.
  std::string label;
  // What is given stays as it is; the rest suits the way the ranks are connected, and may be tuned.
  std::optional<size_t> fusion_threshold;
  std::optional<bool> hierarchical_allreduce;
  size_t cache_capacity = 1024;
  double collective_timeout_s = 1800.0;
  // Whether an allgather among several hosts makes use of the memory that ranks of a host share.
  bool hierarchical_allgather = true;
  std::optional<AutotuneOptions> autotune;  // those of rank 0 count
  std::optional<int> processor_core;        // where the engine's thread runs; anywhere when empty
  std::shared_ptr<const DeviceLibraries> device_libraries;  // null: no operations on devices
  bool shares_device = false;  // other engines use the devices of the ranks, see kShareDeviceName
  std::shared_ptr<Timeline> timeline;  // another engine's; null: one of its own
  std::string timeline_label;          // tells this engine's tensors from those of the other
};

// A barrier of this name tells the ranks that from then on other engines use their devices, too.
inline constexpr const char* kShareDeviceName = "devices.share";

// When an operation begins.
enum class Start {
  kNow,        // on the engine's thread
  kWithWaiter  // when somebody waits for it, on the thread that waits; or with the next kNow
};

// Ranks run cycles in lockstep. A rank enters a cycle as soon as it has submitted something or
// waits for something, and the cycle lasts until all ranks have entered it, so nobody waits for a
// tick and an idle job costs nothing. When a cycle brought nothing new to anybody (every rank waits
// for something that others have not submitted yet) the next one is put off by up to kLongestPause,
// or until something is submitted here.
//
// One thread at a time runs cycles; it is said to steer. The engine's own thread steers when there
// is work and nobody else does. A thread that waits for an operation steers instead while it waits:
// handing a small operation over to another thread and back takes longer than the operation. What
// nobody waits for is gathered for up to kGathering, so that the tensors of a burst travel together
// and the engine's thread is not in the way of the one that submits them.
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

  // What is in force on all ranks, and whether it may still change.
  Retuning tuning() const;

  // The caller keeps the buffers alive until the operation is settled. With `device` they are in
  // its memory; a join that has it tells what it would use for the others' tensors. Fails with
  // kInvalidArgument for a request that cannot work or a name that is in flight already, and with
  // the engine's failure once it has one.
  Result<std::shared_ptr<Operation>> Submit(Request request, const std::byte* source,
                                            std::byte* target, Start start = Start::kNow,
                                            const std::optional<DeviceStream>& device = {});

  // The outcome of an operation of this engine; kTimeout naming the tensor when there is none by
  // the deadline (the operation goes on).
  Status Wait(Operation& operation, Deadline deadline);

  // Submits all or none; requests of one `group` have to come together.
  struct Submission {
    Request request;
    const std::byte* source;
    std::byte* target;
    std::optional<DeviceStream> device = {};
  };
  Result<std::vector<std::shared_ptr<Operation>>> SubmitAll(std::vector<Submission> submissions,
                                                            Start start = Start::kNow);

  // Lets what was submitted with kWithWaiter begin without one.
  void StartNow();

  // Whether AllreduceNow works: all ranks of the job share memory.
  bool has_direct_calls() const { return direct_calls_.has_value(); }

  // An allreduce without a name and without negotiation, on the calling thread: every rank must
  // make the same calls in the same order. It may run beside anything else that the engine does.
  // `interrupted` is asked from time to time during a wait; a call that was interrupted ends the
  // engine, as any failure but kMismatch and kInvalidArgument does.
  Status AllreduceNow(const Reduction& reduction, const std::byte* source, std::byte* target,
                      size_t count, const std::function<bool()>& interrupted);

  // Why this engine has ended; OK as long as it goes on, and after an orderly Shutdown. What is
  // done on a device may have failed there since.
  Status Failure() const;

  // Ends every pending and future operation here and on all peers with kAborted.
  void Abort(const std::string& why);

  // Leaves the job: pending operations fail with kShutDown. May be called again.
  Status Shutdown(Deadline deadline);

  // In a forked child, where nothing else may be called: closes its copies of the links.
  void CloseCopies() const { mesh_.sockets.CloseCopies(); }

 private:
  using OperationPointer = std::shared_ptr<Operation>;

  // A cycle that this rank has entered and that has not concluded.
  struct Entered {
    Deadline deadline;
    Deadline::Clock::time_point start;
    size_t submitted = 0;
    bool deposited = false;
  };

  void Main();
  bool AwaitWork(std::unique_lock<std::mutex>& lock);
  void SteerUntilDone(const Operation& operation, Deadline deadline);
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
  Status Trouble();
  void LeaveDevices();
  void CompleteDeposits(const std::vector<Ready>& ready, const ArenaSteps::Round& round);
  // Operations that are submitted together on one stream share the point at which they are ready.
  struct Mark {
    DeviceStream submitter;
    std::shared_ptr<const DeviceEvent> point;
  };
  Result<OperationPointer> Make(Submission submission, std::optional<Mark>& mark);
  Status Enqueue(Span<const OperationPointer> operations, Start start);  // all or none
  Status TakeIn(Span<const OperationPointer> operations);                // mutex_ is held
  Status Refusal(const Request& request) const;                          // mutex_ is held
  Result<OperationPointer> Accept(const Agreement& agreement);
  OperationPointer TakePending(std::string_view name);
  // They are of one kind where they succeeded.
  void Complete(Span<const OperationPointer> operations, const Status& status) noexcept;
  void CountOperations(OperationKind kind, size_t number, size_t bytes);
  void EnterAll(const std::vector<OperationPointer>& operations, Phase phase);
  void EndTogether(const Status& own) noexcept;
  void End(const Status& why) noexcept;
  void FailEverything() noexcept;
  Status FirstFailure(const Status& own) noexcept;
  void Hurry();
  std::string PendingTitles() const;

  const EngineConfig config_;
  Mesh mesh_;  // empty once the engine has left; changed under leave_mutex_, after the thread has
               // ended
  const FailureBoard board_;
  const int rank_;
  const int size_;
  std::vector<int> local_ranks_;
  std::vector<int> host_ranks_;
  Counters counters_;
  EngineTimeline timeline_;

  // Of the thread that steers, which may be handed over (under mutex_) at any time.
  std::optional<ArenaSteps> steps_;  // where there is an arena
  std::unique_ptr<Negotiation> negotiation_;
  Execution execution_;
  DeviceExecution devices_;  // some of it is for any thread
  std::unique_ptr<Will> will_;
  Deadline::Clock::time_point next_look_{};  // at the board
  std::unique_ptr<Autotuner> autotuner_;     // of rank 0, as long as it searches
  std::unordered_map<std::string_view, OperationPointer> pending_;  // by their names
  std::optional<Entered> entered_;
  std::chrono::microseconds pause_{0};
  Deadline::Clock::time_point pause_end_{};

  mutable std::mutex mutex_;      // guards what follows; an Operation's mutex may be taken inside
  std::condition_variable wake_;  // for the engine's thread
  std::condition_variable finished_changed_;
  bool steered_ = false;  // somebody runs a cycle
  std::vector<OperationPointer> queue_;
  // What is queued, pending or running, by name: whatever fails, nothing is forgotten.
  std::unordered_map<std::string_view, OperationPointer> in_flight_;
  size_t queued_bytes_ = 0;
  bool gathering_ = false;  // the engine's thread knows that something is queued and will take it
  Deadline::Clock::time_point gathered_{};  // then
  bool joined_ = false;                     // a join is in flight
  Retuning tuning_;
  std::optional<Status> end_;  // why nothing can be submitted any more
  bool finished_ = false;

  std::mutex direct_mutex_;  // one direct call at a time; taken before mutex_
  std::optional<DirectCalls> direct_calls_;

  std::mutex leave_mutex_;  // one Shutdown or Abort at a time; taken before the others
  std::thread thread_;
};

}  // namespace sparkhvd
