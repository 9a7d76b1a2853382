// The request of a rank that submits an operation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace sparkhvd {

enum class OperationKind : uint8_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kBarrier,
  kAlltoall,
  kReducescatter,
  kJoin,
};
constexpr OperationKind kLastOperationKind = OperationKind::kJoin;

const char* Name(OperationKind kind);

// The name of every join, reserved for it.
constexpr const char* kJoinName = "join()";

// The fields that ranks have to agree on (Disagreement() compares the requests of two ranks for one
// tensor), and the prescale, which is each rank's own: it is neither sent nor compared. In the
// memory of devices the submitter scales; there the factors are only compared.
struct Request {
  std::string name;
  OperationKind kind = OperationKind::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // allreduce, reducescatter
  int32_t root = 0;              // broadcast
  double prescale = 1.0;         // allreduce, reducescatter; this rank's own
  double postscale = 1.0;        // allreduce, reducescatter
  std::vector<int64_t> shape;    // allgather, alltoall: the first dimension may differ among ranks
  std::vector<int64_t> splits;   // alltoall: how many rows go to each rank; each rank's own
  std::string group;             // operations that run or fail together; empty for one alone
  uint32_t group_size = 0;       // operations in the group
  bool on_device = false;        // whether the buffers are in the memory of a CUDA device

  bool operator==(const Request& other) const;

  // The title in error messages, such as "allreduce 'grad/7'".
  std::string Title() const;
};

// Whether the operation combines numbers.
bool Reduces(OperationKind kind);

// Elements in a row of the first dimension.
size_t RowElements(const Request& request);

// The bytes for each number of rows; kInvalidArgument unless there are `expected` numbers and the
// bytes fit.
Result<std::vector<size_t>> BytesOf(const Request& request, const std::vector<int64_t>& rows,
                                    size_t expected);

// An alltoall's rows for `rank`, by sender; `rows` as in the agreement.
std::vector<int64_t> RowsReceived(const std::vector<int64_t>& rows, int rank, int size);

// Elements of `shape`; nothing when a dimension is negative or the product does not fit.
std::optional<size_t> ElementCount(const std::vector<int64_t>& shape);

// The problem of a request by itself, as a sentence; nothing for a valid one.
std::optional<std::string> Problem(const Request& request, int size);

// The difference between the requests of two ranks for one name, with both values; nothing when
// they agree.
std::optional<std::string> Disagreement(const Request& first, int first_rank, const Request& second,
                                        int second_rank);

}  // namespace sparkhvd
