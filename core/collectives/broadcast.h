// Broadcast of one rank's bytes to all ranks.
#pragma once

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// Only the root reads `source`. Every rank receives into `target`, which may be the source on the
// root.
Status BroadcastTree(Transport& transport, int root, const std::byte* source, Bytes target,
                     Deadline deadline);

// Like BroadcastTree, among the members of an arena. `root` is a member.
Status BroadcastShm(ArenaSteps& steps, int root, const std::byte* source, Bytes target,
                    Deadline deadline);

}  // namespace sparkhvd
