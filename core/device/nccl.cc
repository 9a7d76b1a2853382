#include "device/nccl.h"

#include <thread>

#include "device/library.h"

namespace sparkhvd {
namespace {

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// NCCL does not signal the progress of background work, so AwaitResult polls: without a pause for
// as long as most calls take, and then at this interval.
constexpr std::chrono::microseconds kSoon{200};

}  // namespace

Status NcclFunctions::Check(const char* call, int result, ncclComm* communicator) const {
  if (result == kNcclSuccess) return Status();
  std::string message = std::string(call) + " failed: " + get_error_string(result);
  const char* detail = get_last_error(communicator);
  if (detail != nullptr && *detail != '\0') message += std::string(" (") + detail + ")";
  const StatusCode code = result == kNcclRemoteError    ? StatusCode::kPeerLost
                          : result == kNcclInvalidUsage ? StatusCode::kInvalidArgument
                                                        : StatusCode::kIo;
  return Status(code, message);
}

Result<std::shared_ptr<const NcclFunctions>> LoadNccl(const std::string& path) {
  const Result<Library> opened = Library::Open(path);
  SHVD_TRY(opened.status());
  const Library& library = opened.value();
  NcclFunctions nccl{};
  SHVD_TRY(library.Find("ncclGetVersion", nccl.get_version));
  if (nccl.get_version(&nccl.version) != kNcclSuccess || nccl.version < kOldestNccl) {
    return Status(StatusCode::kIo, path + " is NCCL " + VersionText(nccl.version) + "; " +
                                       VersionText(kOldestNccl) + " or newer is needed");
  }
  SHVD_TRY(library.Find("ncclGetErrorString", nccl.get_error_string));
  SHVD_TRY(library.Find("ncclGetLastError", nccl.get_last_error));
  SHVD_TRY(library.Find("ncclGetUniqueId", nccl.get_unique_id));
  SHVD_TRY(library.Find("ncclCommInitRankConfig", nccl.init_rank));
  SHVD_TRY(library.Find("ncclCommAbort", nccl.abort));
  SHVD_TRY(library.Find("ncclCommFinalize", nccl.finalize));
  SHVD_TRY(library.Find("ncclCommDestroy", nccl.destroy));
  SHVD_TRY(library.Find("ncclCommGetAsyncError", nccl.get_async_error));
  SHVD_TRY(library.Find("ncclGroupStart", nccl.group_start));
  SHVD_TRY(library.Find("ncclGroupEnd", nccl.group_end));
  SHVD_TRY(library.Find("ncclAllReduce", nccl.all_reduce));
  SHVD_TRY(library.Find("ncclReduce", nccl.reduce));
  SHVD_TRY(library.Find("ncclReduceScatter", nccl.reduce_scatter));
  SHVD_TRY(library.Find("ncclBroadcast", nccl.broadcast));
  SHVD_TRY(library.Find("ncclAllGather", nccl.all_gather));
  SHVD_TRY(library.Find("ncclSend", nccl.send));
  SHVD_TRY(library.Find("ncclRecv", nccl.receive));
  return std::shared_ptr<const NcclFunctions>(std::make_shared<NcclFunctions>(nccl));
}

std::optional<int> NcclType(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUInt8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    case DType::kBool:
    case DType::kUInt16:
    case DType::kInt16:
      break;
  }
  return std::nullopt;
}

std::optional<int> NcclOperator(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kProduct:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kMin:
      return 3;
    case ReduceOp::kAverage:
      return 4;
    case ReduceOp::kAdasum:
      break;
  }
  return std::nullopt;
}

Result<NcclId> NcclCommunicator::NewId(const NcclFunctions& nccl) {
  NcclId id{};
  SHVD_TRY(nccl.Check("ncclGetUniqueId", nccl.get_unique_id(&id)));
  return id;
}

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Connect(
    std::shared_ptr<const NcclFunctions> nccl, const NcclId& id, int rank, int size,
    const Waiting& waiting) {
  std::unique_ptr<NcclCommunicator> communicator(new NcclCommunicator(std::move(nccl)));
  NcclConfig config;
  const int result =
      communicator->nccl_->init_rank(&communicator->handle_, size, id, rank, &config);
  const Status connected = communicator->AwaitResult("ncclCommInitRankConfig", result, waiting);
  if (connected.code() == StatusCode::kInvalidArgument) {  // such as two ranks on one device
    return Status(connected.code(),
                  connected.message() +
                      ". With NCCL every rank needs a GPU of its own: choose it with "
                      "torch.cuda.set_device(hvd.local_rank()), ask Spark for one per rank "
                      "(gpus_per_task=1), or set SPARKHVD_GPU_OPERATIONS=staged");
  }
  SHVD_TRY(connected);
  return communicator;
}

NcclCommunicator::~NcclCommunicator() {
  if (handle_ != nullptr) nccl_->abort(handle_);
}

Status NcclCommunicator::Finish(std::unique_ptr<NcclCommunicator> communicator,
                                const Waiting& waiting) {
  const NcclFunctions& nccl = *communicator->nccl_;
  const int begun = nccl.finalize(communicator->handle_);
  SHVD_TRY(communicator->AwaitResult("ncclCommFinalize", begun, waiting));
  // No call is left to wait for, and the handle is invalid whatever the result.
  return nccl.Check("ncclCommDestroy", nccl.destroy(std::exchange(communicator->handle_, nullptr)));
}

void NcclCommunicator::Abandon(std::unique_ptr<NcclCommunicator> communicator) {
  communicator->handle_ = nullptr;
}

Status NcclCommunicator::Together(const std::vector<NcclCall>& calls, const Waiting& waiting) {
  SHVD_TRY(nccl_->Check("ncclGroupStart", nccl_->group_start(), handle_));
  Status status;
  for (const NcclCall& call : calls) {
    const int result = call.make(*nccl_, handle_);
    if (result == kNcclInProgress) continue;  // NCCL runs the calls of a group at its end
    status = nccl_->Check(call.name, result, handle_);
    if (!status.ok()) break;
  }
  const int ended = nccl_->group_end();
  SHVD_TRY(status);
  return AwaitResult("ncclGroupEnd", ended, waiting);
}

Status NcclCommunicator::Failure() const {
  int result = kNcclSuccess;
  SHVD_TRY(nccl_->Check("ncclCommGetAsyncError", nccl_->get_async_error(handle_, &result)));
  return result == kNcclInProgress ? Status() : nccl_->Check("NCCL", result, handle_);
}

// Waits for the result of a call that continues in the background.
Status NcclCommunicator::AwaitResult(const char* call, int result, const Waiting& waiting) const {
  const auto start = Deadline::Clock::now();
  while (result == kNcclInProgress) {
    if (waiting.deadline.Expired()) {
      return Status(StatusCode::kTimeout,
                    std::string(call) + " is not done yet; some rank may not have reached it");
    }
    if (Deadline::Clock::now() - start < kSoon) {
      std::this_thread::yield();
    } else {
      SHVD_TRY(waiting.check());
      std::this_thread::sleep_for(kSoon);
    }
    SHVD_TRY(nccl_->Check("ncclCommGetAsyncError", nccl_->get_async_error(handle_, &result)));
  }
  return nccl_->Check(call, result, handle_);
}

}  // namespace sparkhvd
