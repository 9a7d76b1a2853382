#include "collectives/allreduce_hierarchical.h"

#include "collectives/allgather.h"
#include "collectives/allreduce_links.h"
#include "collectives/kernels.h"
#include "collectives/reducescatter.h"
#include "collectives/slices.h"
#include "transport/transport_subset.h"

namespace sparkhvd {
namespace {

// Returns the reduction inside a group. Its result is a contribution to the reduction among groups.
Reduction Unfinished(const Reduction& whole) {
  Reduction part = whole;
  if (part.op == ReduceOp::kAverage) part.op = ReduceOp::kSum;
  part.postscale = 1.0;
  return part;
}

// Indexed by member; empty for members outside the lanes.
std::vector<Slice> LaneSlices(const Hierarchy& hierarchy, size_t count, size_t grain) {
  std::vector<Slice> slices = EvenSlices(count, hierarchy.lanes(), grain);
  slices.resize(hierarchy.own_group().size(), Slice{count, 0});
  return slices;
}

}  // namespace

// Three steps: the members of a group combine their contributions, each the slice of its lane; the
// members of a lane reduce that slice over their links; the members of a group share their slices.
// A byte of long data then leaves and enters a host as often as with one rank per host: 2 (H - 1) /
// H times with H groups, which is the minimum (Patarasuk and Yuan 2009). All lanes between two
// hosts carry data at the same time.
Status AllreduceHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             const Reduction& reduction, const std::byte* source, std::byte* target,
                             size_t count, std::vector<std::byte>& scratch, Deadline deadline) {
  if (count == 0) return Status();
  const size_t width = SizeOf(reduction.dtype);
  const std::vector<Slice> slices = LaneSlices(hierarchy, count, kCacheLine / width);
  const Slice own = slices[static_cast<size_t>(hierarchy.member)];
  std::byte* const lane = target + own.begin * width;
  if (steps == nullptr) {
    CopyPrescaled(reduction, target, source, count);
  } else {
    SHVD_TRY(ReducescatterShm(*steps, Unfinished(reduction), source, lane, slices, deadline)
                 .Annotate("inside the host"));
  }
  if (own.count > 0) {
    TransportSubset peers(transport, hierarchy.LaneRanks(), hierarchy.lanes());
    SHVD_TRY(AllreduceLinksInPlace(peers, reduction, hierarchy.size(), lane, own.count, scratch,
                                   deadline)
                 .Annotate("between hosts"));
  }
  if (steps == nullptr) return Status();
  std::vector<size_t> lengths;
  for (const Slice& slice : slices) lengths.push_back(slice.count * width);
  return AllgatherShm(*steps, ConstBytes(lane, own.count * width), lengths,
                      Bytes(target, count * width), deadline)
      .Annotate("inside the host, after the exchange between hosts");
}

}  // namespace sparkhvd
