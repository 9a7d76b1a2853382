// A Transport over one stream socket per peer.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "rendezvous/socket.h"
#include "transport/link_maker.h"
#include "transport/transport.h"

namespace sparkhvd {

// `peers` has one entry per rank. The entry of this rank is empty, and so are those of the links
// that `maker` makes when they are first used. Without it, all links exist. Sockets are
// non-blocking and authenticated. A peer is lost if its host is silent for longer than `silence`,
// but not if it is only slow. Fails if a link is encrypted and OpenSSL is missing.
Result<std::unique_ptr<Transport>> MakeSocketTransport(
    int rank, std::vector<PeerSocket> peers, const LinkCosts& costs = {},
    std::chrono::milliseconds silence = kSilentLink, std::unique_ptr<LinkMaker> maker = nullptr);

}  // namespace sparkhvd
