// Allreduce among all ranks of a transport, by the algorithm that suits the data.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Reduces `count` elements of every rank. All ranks get the same bits. `target` may be `source`.
// `scratch` is the caller's working memory; it grows as needed and should be reused.
Status AllreduceLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, std::vector<std::byte>& scratch,
                      Deadline deadline);

// Reduces contributions that are already scaled, in place. Together they stand for `ranks` ranks.
Status AllreduceLinksInPlace(Transport& transport, const Reduction& reduction, int ranks,
                             std::byte* data, size_t count, std::vector<std::byte>& scratch,
                             Deadline deadline);

}  // namespace sparkhvd
