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

// The reserved name of every join.
constexpr const char* kJoinName = "join()";

// The fields that ranks must agree on, which Disagreement() compares for one tensor. The prescale
// and the splits are each rank's own and are neither sent nor compared. For device memory, the
// submitter applies both factors, and the engine only compares the postscale.
struct Request {
  std::string name;
  OperationKind kind = OperationKind::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // allreduce, reducescatter
  int32_t root = 0;              // broadcast
  double prescale = 1.0;         // allreduce, reducescatter; this rank's own
  double postscale = 1.0;        // allreduce, reducescatter
  std::vector<int64_t> shape;    // allgather, alltoall: the first dimension may differ by rank
  std::vector<int64_t> splits;   // alltoall: rows for each rank; this rank's own
  std::string group;             // operations that run or fail together; empty for a single one
  uint32_t group_size = 0;       // operations in the group
  bool on_device = false;        // whether the buffers are in CUDA device memory

  // Compares what other ranks need to know. Other ranks do not need to know the rows of an
  // alltoall.
  bool operator==(const Request& other) const;

  // Returns the title for error messages, such as "allreduce 'grad/7'".
  std::string Title() const;
};

// Returns whether the operation does arithmetic.
bool Reduces(OperationKind kind);

// Returns the number of elements in a row of the first dimension.
size_t RowElements(const Request& request);

// Returns the bytes of each number of rows. Fails with kInvalidArgument unless there are `expected`
// numbers and the bytes fit.
Result<std::vector<size_t>> BytesOf(const Request& request, const std::vector<int64_t>& rows,
                                    size_t expected);

// Returns the number of elements of `shape`, or nothing if a dimension is negative or the product
// overflows.
std::optional<size_t> ElementCount(const std::vector<int64_t>& shape);

// Returns what is wrong with a single request, as a sentence; nothing for a valid one.
std::optional<std::string> Problem(const Request& request, int size);

// Returns the difference between two ranks' requests for one name, with both values; nothing if
// they agree.
std::optional<std::string> Disagreement(const Request& first, int first_rank, const Request& second,
                                        int second_rank);

}  // namespace sparkhvd
