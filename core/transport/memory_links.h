// A Transport over rings in memory that the ranks of one host share. It opens no descriptor.
#pragma once

#include <cstddef>
#include <memory>

#include "base/status.h"
#include "transport/shared_arena.h"
#include "transport/transport.h"

namespace sparkhvd {

// Returns the bytes of the links of `count` ranks, in whole pages: at most about 256 KiB per rank,
// up to 64 ranks.
size_t MemoryLinksBytes(size_t count);

// Writes the header of new links to zeroed memory. The creator calls it once, before other ranks
// map the memory.
void FormatMemoryLinks(SharedMapping& mapping, size_t count);

// Fails with kInternal unless `mapping` holds the links of `count` ranks.
Status CheckMemoryLinks(const SharedMapping& mapping, size_t count);

// `watches` has one watch per rank, and is null if the ranks are threads of one process.
std::unique_ptr<Transport> MakeMemoryTransport(std::shared_ptr<SharedMapping> mapping, int rank,
                                               int size,
                                               std::shared_ptr<const MemberWatches> watches,
                                               const LinkCosts& costs = {});

}  // namespace sparkhvd
