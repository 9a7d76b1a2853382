// Broadcast of one rank's bytes to all ranks.
#pragma once

#include <functional>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/select.h"
#include "transport/transport.h"

namespace sparkhvd {

// Takes a piece that has arrived, while later pieces are under way.
using TakePiece = std::function<Status(Bytes piece)>;

// Only the root reads `source`. Every rank receives into `target`, which may be the source on the
// root. `take` is called for every piece in order, on the root, too.
Status BroadcastLinks(Transport& transport, const BroadcastRoute& route, int root,
                      const std::byte* source, Bytes target, Deadline deadline,
                      const TakePiece& take = {});

// Like BroadcastLinks, among the members of an arena. `root` is a member.
Status BroadcastShm(ArenaSteps& steps, int root, const std::byte* source, Bytes target,
                    Deadline deadline);

}  // namespace sparkhvd
