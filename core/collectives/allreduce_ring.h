// Allreduce around a ring, for data that takes longer to transfer than messages to travel.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Reduces contributions that are already scaled, in place. Together they stand for `ranks` ranks.
// All ranks get the same bits. `scratch` is the caller's working memory; it grows as needed and
// should be reused.
Status AllreduceRingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                            std::byte* data, size_t count, std::vector<std::byte>& scratch,
                            Deadline deadline);

}  // namespace sparkhvd
