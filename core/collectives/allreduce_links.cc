#include "collectives/allreduce_links.h"

#include "collectives/allreduce_doubling.h"
#include "collectives/allreduce_ring.h"
#include "collectives/kernels.h"
#include "collectives/select.h"

namespace sparkhvd {

Status AllreduceLinksInPlace(Transport& transport, const Reduction& reduction, int ranks,
                             std::byte* data, size_t count, std::vector<std::byte>& scratch,
                             Deadline deadline) {
  const bool doubles = count * SizeOf(reduction.dtype) <= DoublingBytes(transport.size());
  return (doubles ? AllreduceDoublingInPlace : AllreduceRingInPlace)(
      transport, reduction, ranks, data, count, scratch, deadline);
}

Status AllreduceLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, std::vector<std::byte>& scratch,
                      Deadline deadline) {
  CopyPrescaled(reduction, target, source, count);
  return AllreduceLinksInPlace(transport, reduction, transport.size(), target, count, scratch,
                               deadline);
}

}  // namespace sparkhvd
