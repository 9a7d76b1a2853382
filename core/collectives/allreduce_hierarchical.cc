#include "collectives/allreduce_hierarchical.h"

#include "collectives/allgather.h"
#include "collectives/allreduce_links.h"
#include "collectives/kernels.h"
#include "collectives/lane_thread.h"
#include "collectives/reducescatter.h"
#include "collectives/select.h"
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

// The three steps of one rank. A step works on a part of the elements.
class Hierarchical {
 public:
  Hierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
               const Reduction& reduction, const std::byte* source, std::byte* target,
               std::vector<std::byte>& scratch, Deadline deadline)
      : peers_(transport, hierarchy.in_lane() ? hierarchy.LaneRanks() : std::vector<int>(),
               hierarchy.lanes()),
        steps_(steps),
        hierarchy_(hierarchy),
        reduction_(reduction),
        width_(SizeOf(reduction.dtype)),
        source_(source),
        target_(target),
        scratch_(scratch),
        deadline_(deadline) {}

  // The members of the group combine their contributions, each the slice of its lane.
  Status Combine(Slice part) const {
    const size_t offset = part.begin * width_;
    if (steps_ == nullptr) {
      CopyPrescaled(reduction_, target_ + offset, source_ + offset, part.count);
      return Status();
    }
    return ReducescatterShm(*steps_, Unfinished(reduction_), source_ + offset, Lane(part),
                            LaneSlices(part), deadline_)
        .Annotate("inside the host");
  }

  // The members of a lane reduce their slice over their links.
  Status Exchange(Slice part) {
    const size_t count = OwnSlice(part).count;
    if (count == 0) return Status();
    return AllreduceLinksInPlace(peers_, reduction_, hierarchy_.size(), Lane(part), count, scratch_,
                                 deadline_)
        .Annotate("between hosts");
  }

  // The members of the group share their slices.
  Status Share(Slice part) const {
    if (steps_ == nullptr) return Status();
    std::vector<size_t> lengths;
    for (const Slice& slice : LaneSlices(part)) lengths.push_back(slice.count * width_);
    return AllgatherShm(*steps_, ConstBytes(Lane(part), OwnSlice(part).count * width_), lengths,
                        Bytes(target_ + part.begin * width_, part.count * width_), deadline_)
        .Annotate("inside the host, after the exchange between hosts");
  }

 private:
  // Indexed by member; empty for members outside the lanes.
  std::vector<Slice> LaneSlices(Slice part) const {
    std::vector<Slice> slices = EvenSlices(part.count, hierarchy_.lanes(), kCacheLine / width_);
    slices.resize(hierarchy_.own_group().size(), Slice{part.count, 0});
    return slices;
  }
  Slice OwnSlice(Slice part) const {
    if (!hierarchy_.in_lane()) return Slice{part.count, 0};
    return SliceOf(part.count, hierarchy_.lanes(), hierarchy_.member, kCacheLine / width_);
  }
  // Returns the memory of this member's slice.
  std::byte* Lane(Slice part) const {
    return target_ + (part.begin + OwnSlice(part).begin) * width_;
  }

  TransportSubset peers_;
  ArenaSteps* const steps_;
  const Hierarchy& hierarchy_;
  const Reduction& reduction_;
  const size_t width_;
  const std::byte* const source_;
  std::byte* const target_;
  std::vector<std::byte>& scratch_;
  const Deadline deadline_;
};

}  // namespace

// A byte of long data leaves and enters a host as often as with one rank per host: 2 (H - 1) / H
// times with H groups, which is the minimum (Patarasuk and Yuan 2009). All lanes between two hosts
// carry data at the same time. While a part of long data travels between the hosts, the members of
// a group combine the next part and share the previous one.
Status AllreduceHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             const Reduction& reduction, const std::byte* source, std::byte* target,
                             size_t count, std::vector<std::byte>& scratch, Deadline deadline) {
  const int parts = PartsToOverlap(static_cast<int>(hierarchy.groups.size()), hierarchy.lanes(),
                                   count * SizeOf(reduction.dtype), transport.costs());
  return AllreduceInParts(transport, steps, hierarchy, reduction, source, target, count, parts,
                          scratch, deadline);
}

Status AllreduceInParts(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                        const Reduction& reduction, const std::byte* source, std::byte* target,
                        size_t count, int parts, std::vector<std::byte>& scratch,
                        Deadline deadline) {
  if (count == 0) return Status();
  Hierarchical self(transport, steps, hierarchy, reduction, source, target, scratch, deadline);
  LaneThread lane([&self](Slice part) { return self.Exchange(part); },
                  parts > 1 && hierarchy.in_lane());
  const Status status = Guarded([&] {
    Slice previous;
    for (const Slice& part : EvenSlices(count, parts, kCacheLine / SizeOf(reduction.dtype))) {
      SHVD_TRY(self.Combine(part));
      lane.Begin(part);
      if (part.begin > 0) {
        SHVD_TRY(lane.AwaitNext());
        SHVD_TRY(self.Share(previous));
      }
      previous = part;
    }
    SHVD_TRY(lane.AwaitNext());
    return self.Share(previous);
  });
  // A failure inside the host must not leave the exchange waiting.
  if (!status.ok() && lane.busy()) transport.Abort(status);
  return status;
}

}  // namespace sparkhvd
