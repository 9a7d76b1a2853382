#include "scheduler/request.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "collectives/adasum.h"

namespace sparkhvd {
namespace {

std::string Text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string Text(double value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

bool EqualAfterFirst(const std::vector<int64_t>& one, const std::vector<int64_t>& other) {
  return one.size() == other.size() &&
         (one.empty() || std::equal(one.begin() + 1, one.end(), other.begin() + 1));
}

// Returns whether ranks may have different numbers of rows.
bool Ragged(OperationKind kind) {
  return kind == OperationKind::kAllgather || kind == OperationKind::kAlltoall;
}

// Returns what is wrong with an alltoall's splits, if anything.
std::optional<std::string> SplitsProblem(const Request& request, int size) {
  if (request.splits.size() != static_cast<size_t>(size)) {
    return "splits " + Text(request.splits) + " has " + std::to_string(request.splits.size()) +
           " entries for " + std::to_string(size) + " ranks; pass the number of rows for each rank";
  }
  int64_t left = request.shape[0];
  for (const int64_t rows : request.splits) {
    if (rows < 0 || rows > left) left = -1;
    if (left < 0) break;
    left -= rows;
  }
  if (left == 0) return std::nullopt;
  return "splits " + Text(request.splits) + " does not add up to the first dimension (" +
         std::to_string(request.shape[0]) + ")";
}

std::string GroupText(const Request& request) {
  return request.group.empty() ? "it alone" : "it in the group '" + request.group + "'";
}

std::string MemoryText(const Request& request) {
  return request.on_device ? "a tensor in CUDA device memory" : "a tensor in host memory";
}

std::string Differ(const char* what, int first_rank, const std::string& first, int second_rank,
                   const std::string& second) {
  return std::string("ranks disagree about the ") + what + ": rank " + std::to_string(first_rank) +
         " submitted " + first + ", rank " + std::to_string(second_rank) + " submitted " + second;
}

}  // namespace

const char* Name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllreduce:
      return "allreduce";
    case OperationKind::kAllgather:
      return "allgather";
    case OperationKind::kBroadcast:
      return "broadcast";
    case OperationKind::kBarrier:
      return "barrier";
    case OperationKind::kAlltoall:
      return "alltoall";
    case OperationKind::kReducescatter:
      return "reducescatter";
    case OperationKind::kJoin:
      return "join";
  }
  return "unknown operation";
}

bool Request::operator==(const Request& other) const {
  return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
         postscale == other.postscale && name == other.name && group_size == other.group_size &&
         on_device == other.on_device && group == other.group &&
         (kind == OperationKind::kAlltoall ? EqualAfterFirst(shape, other.shape)
                                           : shape == other.shape);
}

std::string Request::Title() const { return std::string(sparkhvd::Name(kind)) + " '" + name + "'"; }

bool Reduces(OperationKind kind) {
  return kind == OperationKind::kAllreduce || kind == OperationKind::kReducescatter;
}

size_t RowElements(const Request& request) {
  std::vector<int64_t> row = request.shape;
  row[0] = 1;
  return ElementCount(row).value_or(0);
}

Result<std::vector<size_t>> BytesOf(const Request& request, const std::vector<int64_t>& rows,
                                    size_t expected) {
  const Status too_many(StatusCode::kInvalidArgument,
                        "the ranks together contribute too many elements");
  const size_t row_bytes = RowElements(request) * SizeOf(request.dtype);
  std::vector<size_t> lengths;
  size_t total = 0;
  if (rows.size() != expected) return too_many;
  for (const int64_t number : rows) {
    constexpr size_t kLimit = std::numeric_limits<ptrdiff_t>::max();
    if (number < 0 ||
        (row_bytes > 0 && static_cast<size_t>(number) > (kLimit - total) / row_bytes)) {
      return too_many;
    }
    lengths.push_back(static_cast<size_t>(number) * row_bytes);
    total += lengths.back();
  }
  return lengths;
}

std::optional<size_t> ElementCount(const std::vector<int64_t>& shape) {
  constexpr size_t kLimit = static_cast<size_t>(std::numeric_limits<int64_t>::max());
  size_t count = 1;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    const auto length = static_cast<size_t>(dimension);
    if (length != 0 && count > kLimit / length) return std::nullopt;
    count *= length;
  }
  return count;
}

std::optional<std::string> Problem(const Request& request, int size) {
  const std::optional<size_t> count = ElementCount(request.shape);
  if (!count || *count > std::numeric_limits<size_t>::max() / 16) {
    return "shape " + Text(request.shape) + " has a negative dimension or too many elements";
  }
  if ((request.kind == OperationKind::kJoin) != (request.name == kJoinName)) {
    return std::string("the name ") + kJoinName + " is reserved for join; use another name";
  }
  const bool by_rows = Ragged(request.kind) || request.kind == OperationKind::kReducescatter;
  if (by_rows && request.shape.empty()) {
    return std::string("a scalar has no first dimension to ") +
           (request.kind == OperationKind::kAllgather ? "gather along" : "divide") +
           "; reshape it to (1,)";
  }
  if (request.kind == OperationKind::kAlltoall) {
    if (auto problem = SplitsProblem(request, size)) return problem;
  }
  if (request.kind == OperationKind::kBroadcast && (request.root < 0 || request.root >= size)) {
    return "root " + std::to_string(request.root) + " is out of range for a job of size " +
           std::to_string(size);
  }
  if (!std::isfinite(request.prescale) || !std::isfinite(request.postscale)) {
    return std::string("prescale and postscale must be finite numbers");
  }
  if (Reduces(request.kind) && request.op == ReduceOp::kAdasum) {
    if (request.kind != OperationKind::kAllreduce) {
      return std::string("adasum works on whole tensors: use it with allreduce");
    }
    if (!SupportsAdasum(request.dtype)) {
      return std::string("adasum is for float16, bfloat16, float32 and float64, not for ") +
             Name(request.dtype);
    }
  }
  if (Reduces(request.kind) && request.dtype == DType::kBool) {
    if (request.op == ReduceOp::kAverage) {
      return std::string("bool has no average; use sum (or), product (and), or another dtype");
    }
    if (request.prescale != 1.0 || request.postscale != 1.0) {
      return std::string("bool cannot be scaled; leave prescale and postscale at 1");
    }
  }
  return std::nullopt;
}

std::optional<std::string> Disagreement(const Request& first, int first_rank, const Request& second,
                                        int second_rank) {
  const auto differ = [&](const char* what, const std::string& one, const std::string& other) {
    return Differ(what, first_rank, one, second_rank, other);
  };
  if (first.kind != second.kind) return differ("operation", Name(first.kind), Name(second.kind));
  if (first.on_device != second.on_device) {
    return differ("memory", MemoryText(first), MemoryText(second));
  }
  if (first.group != second.group) {
    return differ("group", GroupText(first), GroupText(second));
  }
  if (first.group_size != second.group_size) {
    return differ("number of tensors in the group", std::to_string(first.group_size),
                  std::to_string(second.group_size));
  }
  if (first.dtype != second.dtype) return differ("dtype", Name(first.dtype), Name(second.dtype));
  const bool ragged = Ragged(first.kind);
  const bool same_shape =
      ragged ? EqualAfterFirst(first.shape, second.shape) : first.shape == second.shape;
  if (!same_shape) {
    return differ(ragged ? "shape after the first dimension" : "shape", Text(first.shape),
                  Text(second.shape));
  }
  if (first.op != second.op) return differ("reduce operation", Name(first.op), Name(second.op));
  if (first.root != second.root) {
    return differ("root", std::to_string(first.root), std::to_string(second.root));
  }
  if (first.postscale != second.postscale) {
    return differ("postscale", Text(first.postscale), Text(second.postscale));
  }
  return std::nullopt;
}

}  // namespace sparkhvd
