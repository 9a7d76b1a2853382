// Allreduce among all ranks of a transport.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Reduces `count` elements of every rank. SelectForLinks chooses the algorithm. All ranks get
// bitwise identical results. `target` may be `source`. `scratch` is the caller's working memory; it
// grows as needed and should be reused.
Status AllreduceLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, std::vector<std::byte>& scratch,
                      Deadline deadline);

// Reduces contributions that are already scaled, in place. Together they stand for `ranks` ranks.
Status AllreduceLinksInPlace(Transport& transport, const Reduction& reduction, int ranks,
                             std::byte* data, size_t count, std::vector<std::byte>& scratch,
                             Deadline deadline);

// Like AllreduceLinksInPlace, but each with one fixed algorithm among n ranks:
// - AllreduceRingInPlace sends the data around a ring, and sends the fewest bytes.
// - AllreduceHalvingInPlace takes about 2 * log2(n) rounds. A round exchanges a part of the data.
// - AllreduceDoublingInPlace takes about log2(n) rounds. A round exchanges all of the data.
Status AllreduceRingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                            std::byte* data, size_t count, std::vector<std::byte>& scratch,
                            Deadline deadline);
Status AllreduceHalvingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                               std::byte* data, size_t count, std::vector<std::byte>& scratch,
                               Deadline deadline);
Status AllreduceDoublingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                                std::byte* data, size_t count, std::vector<std::byte>& scratch,
                                Deadline deadline);

}  // namespace sparkhvd
