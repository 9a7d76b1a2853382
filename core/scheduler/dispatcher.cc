#include "scheduler/dispatcher.h"

#include "scheduler/fusion.h"

namespace sparkhvd {

using Clock = Deadline::Clock;

Status Dispatcher::Run(const std::vector<ReadyOperation>& ready) {
  std::vector<const Request*> requests;
  requests.reserve(ready.size());
  for (const ReadyOperation& entry : ready) requests.push_back(&entry.operation->request());
  if (parts_.timeline.on()) {
    for (const Request* request : requests) parts_.timeline.Enter(request->name, Phase::kWait);
  }
  Status failure;
  for (const std::vector<size_t>& positions :
       PlanFusion(requests, parts_.execution.tunables().fusion_threshold)) {
    std::vector<std::shared_ptr<Operation>> group;
    group.reserve(positions.size());
    for (const size_t position : positions) group.push_back(ready[position].operation);
    if (failure.ok()) {
      const auto start = Clock::now();
      const Deadline deadline = Deadline::AfterSeconds(collective_timeout_s_);
      failure = group[0]->request().on_device
                    ? RunOnDevice(ready, positions, deadline)
                    : RunOnHost({group.data(), group.size()}, ready[positions[0]].rows, deadline);
      parts_.counters.collective_us += Microseconds(Clock::now() - start);
      if (!failure.ok()) failure = parts_.lifecycle.FirstFailure(failure);
      if (group.size() > 1) ++parts_.counters.fused_buffers;
    }
    Complete({group.data(), group.size()}, failure);
  }
  return failure;
}

Status Dispatcher::RunOnHost(Operations group, const std::vector<int64_t>& rows,
                             Deadline deadline) {
  const Status status = Guarded([&] {
    return group.size() > 1 ? parts_.execution.Allreduce(group, deadline)
                            : parts_.execution.Run(*group[0], rows, deadline);
  });
  if (group[0]->request().name == kShareDeviceName) parts_.devices.ShareDevice();
  return status;
}

Status Dispatcher::RunOnDevice(const std::vector<ReadyOperation>& ready,
                               const std::vector<size_t>& positions, Deadline deadline) {
  std::vector<const ReadyOperation*> group;
  for (const size_t position : positions) {
    group.push_back(&ready[position]);
    if (parts_.timeline.on()) {
      parts_.timeline.Enter(ready[position].operation->request().name, Phase::kCollective);
    }
  }
  if (!parts_.devices.connected()) will_ = parts_.lifecycle.board().LeaveWill(rank_);
  ++parts_.counters.on_device;
  const Waiting waiting{deadline, [this] { return parts_.lifecycle.Poll(); }};
  DeviceExecution::Links links;
  links.share = [&](Bytes bytes) {
    return parts_.execution.Broadcast(0, bytes.data(), bytes, deadline);
  };
  links.highest = [&](int64_t* number) { return parts_.execution.Highest(number, deadline); };
  links.exchange = [&](const std::vector<int64_t>& splits) {
    return parts_.execution.ExchangeRows(splits, deadline);
  };
  return parts_.devices.Run(group, waiting, links);
}

void Dispatcher::Combine(const std::vector<ReadyOperation>& ready, const ArenaSteps::Round& round) {
  std::vector<std::shared_ptr<Operation>> group;
  for (const ReadyOperation& entry : ready) group.push_back(entry.operation);
  parts_.execution.CombineDeposits({group.data(), group.size()}, round);
  if (group.size() > 1) ++parts_.counters.fused_buffers;
  Complete({group.data(), group.size()}, Status());
}

void Dispatcher::Complete(Operations operations, const Status& status) noexcept {
  parts_.queue.Release(operations);
  if (status.ok() && !operations.empty()) {
    size_t bytes = 0;
    for (const auto& operation : operations) bytes += operation->bytes();
    parts_.counters.Add(operations[0]->request().kind, operations.size(), bytes);
  }
  const Status labelled = label_.empty() ? Status() : AnnotateIfPossible(status, label_);
  for (const auto& operation : operations) {
    if (parts_.timeline.on()) {
      static_cast<void>(Guarded([&] {
        parts_.timeline.End(operation->request().name, status.message());
        return Status();
      }));
    }
    operation->Complete(label_.empty() ? status : labelled);
  }
}

void Dispatcher::FailAll(const Status& why) noexcept {
  while (const std::shared_ptr<Operation> operation = parts_.queue.AnyInFlight()) {
    Complete({&operation, 1}, why);
  }
}

Status Dispatcher::WatchDevice() {
  SHVD_TRY(parts_.devices.Watch());
  return device_busy() ? parts_.lifecycle.Poll() : Status();
}

void Dispatcher::LeaveDevices() {
  const FailureBoard& board = parts_.lifecycle.board();
  const bool orderly = parts_.lifecycle.Failure().ok();
  parts_.devices.Leave(
      orderly
          ? [this, &board](Deadline deadline) { return board.AwaitAllDone(rank_, size_, deadline); }
          : DeviceExecution::EndBarrier());
  board.StopWatching();
  if (will_ && orderly) will_->Withdraw();
  will_.reset();
}

}  // namespace sparkhvd
