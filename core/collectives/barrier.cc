#include "collectives/barrier.h"

#include <string>

#include "collectives/exchange.h"

namespace sparkhvd {

// The dissemination barrier (Hensgen, Finkel and Manber, 1988). After round k, a rank knows that
// the 2^(k+1) - 1 ranks before it have called, directly or through others.
Status Barrier(Transport& transport, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  for (int distance = 1; distance < size; distance *= 2) {
    const std::byte token{1};
    std::byte heard{0};
    SHVD_TRY(Exchange(transport, (rank + distance) % size, ConstBytes(&token, 1),
                      (rank - distance % size + size) % size, Bytes(&heard, 1), deadline)
                 .Annotate("barrier distance " + std::to_string(distance)));
  }
  return Status();
}

}  // namespace sparkhvd
