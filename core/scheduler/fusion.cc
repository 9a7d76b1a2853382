#include "scheduler/fusion.h"

#include <map>
#include <tuple>

namespace sparkhvd {
namespace {

// The alignment of a fused tensor's offset, which suits every vector register.
constexpr size_t kAlignment = 64;

size_t PaddedBytes(const Request& request) {
  const size_t bytes = ElementCount(request.shape).value_or(0) * SizeOf(request.dtype);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::vector<std::vector<size_t>> PlanFusion(const std::vector<const Request*>& ready,
                                            size_t threshold) {
  struct Open {
    size_t group;
    size_t bytes;
  };
  std::map<std::tuple<DType, ReduceOp, double>, Open> open;
  std::map<OperationKind, size_t> on_device;  // each kind's group in device memory
  std::vector<std::vector<size_t>> groups;
  for (size_t position = 0; position < ready.size(); ++position) {
    const Request& request = *ready[position];
    if (request.on_device) {
      const auto [found, first] = on_device.emplace(request.kind, groups.size());
      if (first) groups.emplace_back();
      groups[found->second].push_back(position);
      continue;
    }
    if (request.kind != OperationKind::kAllreduce) {
      groups.push_back({position});
      continue;
    }
    // Excludes the prescale: each rank has its own, and all ranks must make the same plan.
    const auto key = std::make_tuple(request.dtype, request.op, request.postscale);
    const size_t bytes = PaddedBytes(request);
    const auto found = open.find(key);
    if (found != open.end() && bytes <= threshold && found->second.bytes <= threshold - bytes) {
      groups[found->second.group].push_back(position);
      found->second.bytes += bytes;
    } else {
      open[key] = Open{groups.size(), bytes};
      groups.push_back({position});
    }
  }
  return groups;
}

}  // namespace sparkhvd
