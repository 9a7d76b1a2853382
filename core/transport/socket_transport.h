// A Transport over one connected stream socket per peer.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "rendezvous/socket.h"
#include "transport/transport.h"

namespace sparkhvd {

// The connection to one peer. `process` is a pidfd where the peer is on this host, or empty: it
// reports the peer's end even while a child of the peer keeps a copy of the socket.
struct PeerSocket {
  UniqueFd stream;
  UniqueFd process;
};

// `peers` has one entry per rank, this rank's own empty; sockets are non-blocking and
// authenticated. A peer whose host is silent for longer than `silence` is lost; one that is only
// slow is not.
Result<std::unique_ptr<Transport>> MakeSocketTransport(
    int rank, std::vector<PeerSocket> peers, std::chrono::milliseconds silence = kSilentLink);

}  // namespace sparkhvd
