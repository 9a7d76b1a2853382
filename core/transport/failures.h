// The failure messages that all transports share.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"

namespace sparkhvd {

enum class Direction { kSend, kReceive };

// Returns "rank 3" or "ranks 3, 4".
std::string RankNames(const std::vector<int>& ranks);

// Returns "send to rank 3" or "receive from rank 3".
std::string TransferName(Direction direction, int peer);

// What a receiver knows about the length of a message. The text precedes the number of bytes in
// failure messages.
constexpr char kExactly[] = "";
constexpr char kAtMost[] = "at most ";

// Returns kTimeout: "receive from rank 5: 0 of 65536 bytes when the deadline passed".
Status LateTransfer(Direction direction, int peer, size_t done, size_t size,
                    const char* known = kExactly);

// Returns kInternal: both sides of a transfer must agree on its length.
Status LengthMismatch(int peer, size_t sent, size_t expected, const char* known = kExactly);

// How a peer is lost that ended its links without a reason.
inline constexpr char kClosedLinks[] = "it closed its links";

// Returns kPeerLost: "lost rank 3: <how>".
Status PeerLost(int peer, const std::string& how);

// Returns what a rank reports when `peer` aborted with `why`: the same code and "rank 3 aborted:
// <why>". If `peer` has shut down, this rank has not: it has lost the peer.
Status PeerAborted(int peer, const Status& why);

// Fails with kInvalidArgument unless `peer` is another rank of a job with `size` ranks.
Status CheckPeer(int peer, int rank, int size);

}  // namespace sparkhvd
