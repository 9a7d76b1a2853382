// NCCL, loaded at run time, and its communicators, with a deadline for every wait.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "device/cuda.h"
#include "device/waiting.h"

struct ncclComm;  // a name of NCCL's ABI

namespace sparkhvd {

// The id with which ranks connect. NCCL passes it by value.
struct NcclId {
  std::array<std::byte, 128> bytes;
};

// The configuration of NCCL 2.14. Later versions recognize it by its size and version.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

// Results of NCCL's functions.
constexpr int kNcclSuccess = 0;
constexpr int kNcclInvalidUsage = 5;
constexpr int kNcclRemoteError = 6;
constexpr int kNcclInProgress = 7;

constexpr int kNcclBytes = 0;  // the element type of data that is only copied
constexpr int kOldestNccl = 21400;

// Element types and operators are numbers; see NcclType and NcclOperator.
struct NcclFunctions {
  int version = 0;  // 22907 means 2.29.7
  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(ncclComm* communicator);
  int (*get_unique_id)(NcclId* id);
  int (*init_rank)(ncclComm** communicator, int size, NcclId id, int rank, NcclConfig* config);
  int (*abort)(ncclComm* communicator);
  int (*finalize)(ncclComm* communicator);
  int (*destroy)(ncclComm* communicator);
  int (*get_async_error)(ncclComm* communicator, int* result);
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* source, void* target, size_t count, int type, int op,
                    ncclComm* communicator, CudaStream stream);
  int (*reduce)(const void* source, void* target, size_t count, int type, int op, int root,
                ncclComm* communicator, CudaStream stream);
  int (*reduce_scatter)(const void* source, void* target, size_t received, int type, int op,
                        ncclComm* communicator, CudaStream stream);
  int (*broadcast)(const void* source, void* target, size_t count, int type, int root,
                   ncclComm* communicator, CudaStream stream);
  int (*all_gather)(const void* source, void* target, size_t sent, int type, ncclComm* communicator,
                    CudaStream stream);
  int (*send)(const void* source, size_t count, int type, int peer, ncclComm* communicator,
              CudaStream stream);
  int (*receive)(void* target, size_t count, int type, int peer, ncclComm* communicator,
                 CudaStream stream);

  // Converts the `result` of `call`: kPeerLost if NCCL lost another rank, kInvalidArgument for an
  // invalid call, kIo for any other failure.
  Status Check(const char* call, int result, ncclComm* communicator = nullptr) const;
};

// Fails with kIo if NCCL is missing or too old.
Result<std::shared_ptr<const NcclFunctions>> LoadNccl(const std::string& path);

// Returns NCCL's number, or nothing for types and operators that NCCL does not support.
std::optional<int> NcclType(DType dtype);
std::optional<int> NcclOperator(ReduceOp op);

// One NCCL call; `make` makes it and returns its result.
struct NcclCall {
  const char* name;
  std::function<int(const NcclFunctions&, ncclComm*)> make;
};

// One rank of a communicator, on the device that is current when the rank connects. One thread at a
// time may use it.
class NcclCommunicator {
 public:
  static Result<NcclId> NewId(const NcclFunctions& nccl);

  // Returns once all ranks have connected.
  static Result<std::unique_ptr<NcclCommunicator>> Connect(
      std::shared_ptr<const NcclFunctions> nccl, const NcclId& id, int rank, int size,
      const Waiting& waiting);

  // Aborts running collectives without waiting for the other ranks. Collectives that are not
  // complete on all ranks may then fail there.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Makes the calls, which run as one group. Returns once they are on their streams.
  Status Together(const std::vector<NcclCall>& calls, const Waiting& waiting);

  // Returns a failure since the last call, on the device or on the links to other ranks.
  Status Failure() const;

  // Frees everything once the collectives are complete on all ranks. If that fails, the
  // communicator must be destroyed.
  static Status Finish(std::unique_ptr<NcclCommunicator> communicator, const Waiting& waiting);

  // Keeps the communicator until the process ends, for collectives that may not be complete on
  // other ranks.
  static void Abandon(std::unique_ptr<NcclCommunicator> communicator);

 private:
  explicit NcclCommunicator(std::shared_ptr<const NcclFunctions> nccl) : nccl_(std::move(nccl)) {}
  Status AwaitResult(const char* call, int result, const Waiting& waiting) const;

  const std::shared_ptr<const NcclFunctions> nccl_;
  ncclComm* handle_ = nullptr;
};

}  // namespace sparkhvd
