#include "collectives/allreduce_links.h"
#include "collectives/halving.h"
#include "collectives/kernels.h"

namespace sparkhvd {

// Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005).
Status AllreduceHalvingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                               std::byte* data, size_t count, std::vector<std::byte>& scratch,
                               Deadline deadline) {
  if (count == 0) return Status();
  const Bytes whole(data, count * SizeOf(reduction.dtype));
  if (scratch.size() < whole.size()) scratch.resize(whole.size());
  const auto rounds = [&](const Participants& participants) -> Status {
    const std::vector<Slice> slices =
        EvenSlices(count, participants.count, kCacheLine / SizeOf(reduction.dtype));
    const Halving halving{transport, reduction, participants, data, slices, deadline};
    SHVD_TRY(HalvingReduceScatter(halving, scratch.data()));
    const Slice& own = slices[static_cast<size_t>(participants.Reversed(halving.number()))];
    Finish(reduction, ranks, data + own.begin * halving.width(), own.count);
    return HalvingGather(halving);
  };
  return RunAmongParticipants(transport, reduction, whole, whole, scratch.data(), deadline, rounds);
}

}  // namespace sparkhvd
