// What a rank asks for when it submits an operation.
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

// The name of every join; nothing else may have it.
constexpr const char* kJoinName = "join()";

// What ranks have to agree on (two ranks' requests for one tensor are compared with
// Disagreement()), and the factor that is each rank's own: it neither travels nor takes part in
// comparisons. In the memory of devices the submitter scales; there the factors are only compared.
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
  std::string group;             // what all run together or fail together; empty for one alone
  uint32_t group_size = 0;       // operations in the group
  bool on_device = false;        // whether the buffers are in the memory of a CUDA device

  bool operator==(const Request& other) const;

  // "allreduce 'grad/7'", as error messages begin.
  std::string Title() const;
};

// Whether the operation combines numbers.
bool Reduces(OperationKind kind);

// Elements in a row of the first dimension.
size_t RowElements(const Request& request);

// The bytes of each number of rows; kInvalidArgument when there are not `expected` numbers or they
// make too many bytes.
Result<std::vector<size_t>> BytesOf(const Request& request, const std::vector<int64_t>& rows,
                                    size_t expected);

// An alltoall's rows for `rank`, by sender; `rows` as in the agreement.
std::vector<int64_t> RowsReceived(const std::vector<int64_t>& rows, int rank, int size);

// Elements of `shape`; nothing when a dimension is negative or the product does not fit.
std::optional<size_t> ElementCount(const std::vector<int64_t>& shape);

// What is wrong with a request by itself, as a sentence; nothing when it is fine.
std::optional<std::string> Problem(const Request& request, int size);

// How the requests of two ranks for one name contradict each other, with both values; nothing when
// they agree.
std::optional<std::string> Disagreement(const Request& first, int first_rank, const Request& second,
                                        int second_rank);

}  // namespace sparkhvd
