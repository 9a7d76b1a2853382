#include "collectives/allreduce_links.h"
#include "collectives/kernels.h"
#include "collectives/ring.h"
#include "collectives/slices.h"

namespace sparkhvd {

// The ring algorithm (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009). The data is cut into one slice per rank. In N - 1 steps, partial results
// move to the right until every rank holds the complete result of its slice. In N - 1 more steps,
// the results move around the ring.
Status AllreduceRingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                            std::byte* data, size_t count, std::vector<std::byte>& scratch,
                            Deadline deadline) {
  if (count == 0) return Status();
  const std::vector<Slice> slices =
      EvenSlices(count, transport.size(), kCacheLine / SizeOf(reduction.dtype));
  const Ring ring{transport, reduction, data, slices, deadline};
  if (transport.size() > 1) SHVD_TRY(RingReduceScatter(ring, scratch));
  const Slice own = ring.SliceAt(0);
  Finish(reduction, ranks, data + own.begin * ring.width(), own.count);
  if (transport.size() > 1) SHVD_TRY(RingGather(ring));
  return Status();
}

}  // namespace sparkhvd
