#include "collectives/allreduce_links.h"

#include "collectives/kernels.h"
#include "collectives/select.h"

namespace sparkhvd {

Status AllreduceLinksInPlace(Transport& transport, const Reduction& reduction, int ranks,
                             std::byte* data, size_t count, std::vector<std::byte>& scratch,
                             Deadline deadline) {
  const auto allreduce = [&](auto algorithm) {
    return algorithm(transport, reduction, ranks, data, count, scratch, deadline);
  };
  const size_t bytes = count * SizeOf(reduction.dtype);
  switch (SelectForLinks(transport.size(), bytes, transport.costs())) {
    case LinkAlgorithm::kDoubling:
      return allreduce(AllreduceDoublingInPlace);
    case LinkAlgorithm::kHalving:
      return allreduce(AllreduceHalvingInPlace);
    case LinkAlgorithm::kRing:
      break;
  }
  return allreduce(AllreduceRingInPlace);
}

Status AllreduceLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, std::vector<std::byte>& scratch,
                      Deadline deadline) {
  CopyPrescaled(reduction, target, source, count);
  return AllreduceLinksInPlace(transport, reduction, transport.size(), target, count, scratch,
                               deadline);
}

}  // namespace sparkhvd
