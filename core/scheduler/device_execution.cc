#include "scheduler/device_execution.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// Limits how long a leaving rank waits for the work on its device.
constexpr double kFarewellSeconds = 5.0;

// One operation in the terms of NCCL.
struct Part {
  const Request* request;
  const std::byte* source;
  std::byte* target;
  std::vector<size_t> sent;       // alltoall: bytes by receiver
  std::vector<size_t> lengths;    // allgather, alltoall: bytes by sender
  std::vector<int64_t> received;  // rows by rank, for an operation with its own output
  DeviceMemory memory;            // the output, or the substitute of a joined rank
};

bool HasOutput(OperationKind kind) {
  return kind == OperationKind::kAllgather || kind == OperationKind::kAlltoall;
}

// Every function below adds the NCCL calls of one operation. Lengths are in bytes unless the call
// does arithmetic.
class Calls {
 public:
  Calls(int rank, int size, CudaStream stream) : rank_(rank), size_(size), stream_(stream) {}

  void Add(const Part& part) {
    switch (part.request->kind) {
      case OperationKind::kAllreduce:
        return AddAllreduce(part);
      case OperationKind::kReducescatter:
        return AddReducescatter(part);
      case OperationKind::kBroadcast:
        return AddBroadcast(part.source, part.target, BytesIn(part), part.request->root);
      case OperationKind::kAllgather:
        return AddAllgather(part);
      case OperationKind::kAlltoall:
        return AddAlltoall(part);
      case OperationKind::kBarrier:
      case OperationKind::kJoin:
        return;  // these operations have no data
    }
  }

  const std::vector<NcclCall>& all() const { return calls_; }

 private:
  using Functions = const NcclFunctions&;

  static size_t Count(const Part& part) { return ElementCount(part.request->shape).value_or(0); }
  static size_t BytesIn(const Part& part) { return Count(part) * SizeOf(part.request->dtype); }
  static int Type(const Part& part) { return NcclType(part.request->dtype).value_or(0); }
  static int Operator(const Part& part) { return NcclOperator(part.request->op).value_or(0); }

  // Skips calls without elements, which NCCL rejects.
  template <typename Make>
  void Call(const char* name, size_t count, const Make& make) {
    if (count > 0) calls_.push_back(NcclCall{name, make});
  }

  void AddAllreduce(const Part& part) {
    Call("ncclAllReduce", Count(part),
         [source = part.source, target = part.target, count = Count(part), type = Type(part),
          op = Operator(part), stream = stream_](Functions nccl, ncclComm* communicator) {
           return nccl.all_reduce(source, target, count, type, op, communicator, stream);
         });
  }

  // Uses equal parts if the rows divide evenly. Otherwise reduces each part separately to its rank.
  void AddReducescatter(const Part& part) {
    const auto rows = static_cast<size_t>(part.request->shape[0]);
    const size_t row = RowElements(*part.request);
    const int type = Type(part);
    const int op = Operator(part);
    const CudaStream stream = stream_;
    const std::vector<Slice> slices = EvenSlices(rows, size_);
    if (slices.front().count == slices.back().count) {
      const size_t count = slices.front().count * row;
      Call("ncclReduceScatter", count,
           [=, source = part.source, target = part.target](Functions nccl, ncclComm* communicator) {
             return nccl.reduce_scatter(source, target, count, type, op, communicator, stream);
           });
      return;
    }
    for (int root = 0; root < size_; ++root) {
      const Slice& slice = slices[static_cast<size_t>(root)];
      const size_t count = slice.count * row;
      const std::byte* source = part.source + slice.begin * row * SizeOf(part.request->dtype);
      Call("ncclReduce", count, [=, target = part.target](Functions nccl, ncclComm* communicator) {
        return nccl.reduce(source, target, count, type, op, root, communicator, stream);
      });
    }
  }

  void AddBroadcast(const std::byte* source, std::byte* target, size_t bytes, int root) {
    Call("ncclBroadcast", bytes, [=, stream = stream_](Functions nccl, ncclComm* communicator) {
      return nccl.broadcast(source, target, bytes, kNcclBytes, root, communicator, stream);
    });
  }

  // If contributions differ in length, every rank broadcasts its own contribution.
  void AddAllgather(const Part& part) {
    const std::vector<size_t>& lengths = part.lengths;
    const auto differs = [&](size_t length) { return length != lengths[0]; };
    if (std::none_of(lengths.begin(), lengths.end(), differs)) {
      Call("ncclAllGather", lengths[0],
           [source = part.source, target = part.target, length = lengths[0], stream = stream_](
               Functions nccl, ncclComm* communicator) {
             return nccl.all_gather(source, target, length, kNcclBytes, communicator, stream);
           });
      return;
    }
    std::byte* target = part.target;
    for (int root = 0; root < size_; ++root) {
      const size_t length = lengths[static_cast<size_t>(root)];
      AddBroadcast(root == rank_ ? part.source : target, target, length, root);
      target += length;
    }
  }

  void AddAlltoall(const Part& part) {
    const std::byte* source = part.source;
    std::byte* target = part.target;
    const CudaStream stream = stream_;
    for (int peer = 0; peer < size_; ++peer) {
      const auto index = static_cast<size_t>(peer);
      const size_t sent = part.sent[index];
      Call("ncclSend", sent, [=](Functions nccl, ncclComm* communicator) {
        return nccl.send(source, sent, kNcclBytes, peer, communicator, stream);
      });
      source += sent;
      const size_t received = part.lengths[index];
      Call("ncclRecv", received, [=](Functions nccl, ncclComm* communicator) {
        return nccl.receive(target, received, kNcclBytes, peer, communicator, stream);
      });
      target += received;
    }
  }

  const int rank_;
  const int size_;
  const CudaStream stream_;
  std::vector<NcclCall> calls_;
};

// Returns the operation with memory for its output, and for its contribution if this rank has
// joined. `rows` are the rows that this rank receives, by sender, if the operation has an output.
Result<Part> PartOf(const ReadyOperation& ready, const std::vector<int64_t>& rows,
                    const Device& device, int size) {
  const Operation& operation = *ready.operation;
  const Request& request = operation.request();
  Part part{&request, operation.source(), operation.target(), {}, {}, {}, {}};
  Result<DeviceMemory> memory = DeviceMemory();
  if (HasOutput(request.kind)) {
    const auto ranks = static_cast<size_t>(size);
    if (request.kind == OperationKind::kAlltoall) {
      auto sent = BytesOf(request, request.splits, ranks);
      SHVD_TRY(sent.status());
      part.sent = std::move(sent).value();
    }
    auto lengths = BytesOf(request, rows, ranks);
    SHVD_TRY(lengths.status());
    part.lengths = std::move(lengths).value();
    part.received = rows;
    memory = device.Allocate(std::accumulate(part.lengths.begin(), part.lengths.end(), size_t{0}));
    SHVD_TRY(memory.status());
    part.target = memory.value().data();
  } else if (operation.device() == nullptr) {
    memory = device.Upload(ConstBytes(operation.source(), operation.bytes()));
    SHVD_TRY(memory.status());
    part.source = part.target = memory.value().data();
  }
  part.memory = std::move(memory).value();
  return part;
}

}  // namespace

std::optional<std::string> DeviceProblem(const Request& request) {
  if (!Reduces(request.kind)) return std::nullopt;
  const bool whole = request.dtype == DType::kUInt8 || request.dtype == DType::kInt8 ||
                     request.dtype == DType::kInt32 || request.dtype == DType::kInt64;
  const bool rounded = whole && request.op == ReduceOp::kAverage;
  if (NcclType(request.dtype) && NcclOperator(request.op) && !rounded) return std::nullopt;
  return std::string("NCCL does not support ") + Name(request.op) + " of " + Name(request.dtype) +
         "; copy the tensor to the host";
}

Result<std::shared_ptr<const DeviceEvent>> DeviceExecution::Mark(const DeviceStream& submitter) {
  if (!libraries_) {
    return Status(StatusCode::kInvalidArgument,
                  "this engine runs without NCCL; copy the tensor to the host");
  }
  std::shared_ptr<const Device> device;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!device_) {
      Result<std::shared_ptr<const Device>> opened = libraries_->Open(submitter.ordinal);
      SHVD_TRY(opened.status());
      device_ = std::move(opened).value();
    }
    device = device_;
  }
  if (device->ordinal() != submitter.ordinal) {
    return Status(StatusCode::kInvalidArgument,
                  "the tensor is on CUDA device " + std::to_string(submitter.ordinal) +
                      ", but this rank's first collective was on device " +
                      std::to_string(device->ordinal()) +
                      "; with NCCL a rank uses one device: copy the tensor there");
  }
  Result<std::unique_ptr<DeviceEvent>> submitted = device->Record(submitter.stream);
  SHVD_TRY(submitted.status());
  return std::shared_ptr<const DeviceEvent>(std::move(submitted).value());
}

std::shared_ptr<const Device> DeviceExecution::OpenedDevice() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

Status DeviceExecution::Run(const std::vector<const ReadyOperation*>& group, const Waiting& waiting,
                            const Links& links) {
  const std::shared_ptr<const Device> device = OpenedDevice();
  if (!device) {
    return Status(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(rank_) +
                      " has joined without ever using a CUDA device, while other ranks still "
                      "use theirs; pass its device to join()");
  }
  const Device::Current current(*device);
  SHVD_TRY(current.status());
  std::vector<std::vector<int64_t>> rows;  // of the operations, by sender
  for (const ReadyOperation* ready : group) {
    const Request& request = ready->operation->request();
    rows.push_back(ready->rows);
    if (request.kind != OperationKind::kAlltoall) continue;
    auto received = links.exchange(request.splits);
    SHVD_TRY(received.status());
    rows.back() = std::move(received).value();
  }
  const auto turn = AwaitTurn(*device, waiting, links);  // until all calls are on the stream
  SHVD_TRY(turn.status());
  if (!communicator_) SHVD_TRY(Connect(waiting, links).Annotate("connecting NCCL"));

  std::vector<Part> parts;
  Calls calls(rank_, size_, device->stream());
  const DeviceEvent* last = nullptr;
  for (const ReadyOperation* ready : group) {
    const DeviceWork* work = ready->operation->device();
    if (work != nullptr && &work->submitted() != last) {
      last = &work->submitted();
      SHVD_TRY(last->LetWait(device->stream()));
    }
    Result<Part> part = PartOf(*ready, rows[parts.size()], *device, size_);
    SHVD_TRY(part.status());
    parts.push_back(std::move(part).value());
    calls.Add(parts.back());
  }
  SHVD_TRY(communicator_->Together(calls.all(), waiting));

  Result<std::unique_ptr<DeviceEvent>> recorded = device->Record(device->stream());
  SHVD_TRY(recorded.status());
  const std::shared_ptr<const DeviceEvent> finished = std::move(recorded).value();
  for (size_t i = 0; i < group.size(); ++i) {
    Operation& operation = *group[i]->operation;
    if (!operation.device()) continue;
    operation.device()->SetFinished(finished, std::move(parts[i].memory));
    if (HasOutput(operation.request().kind)) {
      operation.SetOutput(nullptr, 0, std::move(parts[i].received));
    }
  }
  running_.push_back(Running{finished, waiting.deadline, group[0]->operation->request().Title()});
  return Status();
}

// Returns null if no other communicator uses the devices.
Result<std::unique_ptr<LaunchOrder::Turn>> DeviceExecution::AwaitTurn(const Device& device,
                                                                      const Waiting& waiting,
                                                                      const Links& links) const {
  if (!shared_) return std::unique_ptr<LaunchOrder::Turn>();
  std::unique_ptr<LaunchOrder::Turn> turn = device.order().Propose(communicator_name_);
  auto ticket = static_cast<int64_t>(turn->proposal());
  SHVD_TRY(links.highest(&ticket).Annotate("agreeing on the order of devices"));
  SHVD_TRY(turn->Await(static_cast<uint64_t>(ticket), waiting));
  return turn;
}

// The ranks connect with an NCCL id that rank 0 sends.
Status DeviceExecution::Connect(const Waiting& waiting, const Links& links) {
  NcclId id{};
  if (rank_ == 0) {
    Result<NcclId> made = NcclCommunicator::NewId(*libraries_->nccl);
    SHVD_TRY(made.status());
    id = made.value();
  }
  SHVD_TRY(links.share(Bytes(id.bytes.data(), id.bytes.size())));
  Result<std::unique_ptr<NcclCommunicator>> connected =
      NcclCommunicator::Connect(libraries_->nccl, id, rank_, size_, waiting);
  SHVD_TRY(connected.status());
  communicator_ = std::move(connected).value();
  return Status();
}

Status DeviceExecution::Watch() {
  while (busy() && running_.front().finished->Reached()) running_.pop_front();
  if (!busy()) return Status();
  const Running& oldest = running_.front();
  SHVD_TRY(communicator_->Failure().Annotate(oldest.title));
  if (!oldest.deadline.Expired()) return Status();
  return Status(StatusCode::kTimeout,
                oldest.title +
                    ": started on the CUDA device but not finished there; some rank may "
                    "have failed");
}

void DeviceExecution::Leave(const EndBarrier& barrier) {
  constexpr std::chrono::milliseconds kInterval(1);
  const Deadline deadline = Deadline::AfterSeconds(kFarewellSeconds);
  // Polls, because a device cannot wake a waiting thread.
  while (barrier && busy() && !deadline.Expired() && Watch().ok()) {
    if (busy()) std::this_thread::sleep_for(kInterval);
  }
  if (communicator_ && barrier && Watch().ok()) {
    // Work that is complete here may be incomplete on other ranks, which use this rank's NCCL
    // memory. A long queue of the program's own work may delay the work there.
    if (!busy() && barrier(deadline).ok()) {
      const Waiting waiting{deadline, [] { return Status(); }};
      static_cast<void>(NcclCommunicator::Finish(std::move(communicator_), waiting));
    } else {
      NcclCommunicator::Abandon(std::move(communicator_));
    }
  }
  communicator_.reset();
  running_.clear();
}

}  // namespace sparkhvd
