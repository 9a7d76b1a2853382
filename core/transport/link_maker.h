// Makes the links that were not made at the start of the job, when they are first used.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "rendezvous/dial.h"
#include "rendezvous/reception.h"
#include "transport/address_record.h"
#include "transport/link_stream.h"
#include "transport/owned_sockets.h"

namespace sparkhvd {

// A dialer claims its rank and the kind of the connection.
enum class ConnectionKind : uint64_t { kLink = 1, kWatch = 2 };
struct RankClaim {
  ConnectionKind kind;
  int rank;
};
// Returns nothing unless the claim is that of another rank of `size`.
std::optional<RankClaim> RankClaimOf(uint64_t claim, int own, int size);

// The connection to one peer. `process` is a pidfd if the peer is on this host, and empty
// otherwise. It reports the peer's end even while a child of the peer keeps a copy of the socket.
// The link is encrypted if there are keys.
struct PeerSocket {
  UniqueFd stream;
  UniqueFd process;
  std::optional<LinkKeys> keys;
};

// How a rank reaches its peers.
struct Contacts {
  int rank = 0;
  std::string token;
  std::string scope;  // of the mesh
  int buffer_bytes = 0;
  std::vector<AddressRecord> records;  // one per rank

  const AddressRecord& Of(int peer) const { return records[static_cast<size_t>(peer)]; }
  bool SameHost(int peer) const;
  std::string Purpose(int acceptor) const;
  // Dials the Unix socket of a peer on this host if `local` is set.
  DialOptions DialOf(int peer, ConnectionKind kind, bool local) const;
  // Returns the link over an authenticated connection. Unix sockets are not encrypted.
  PeerSocket LinkOver(UniqueFd connection, const LinkKeys& keys) const;
};

// Returns a pidfd of the process at the other end of a Unix socket. The result is empty for other
// sockets, for this process itself, and if the kernel or a namespace denies access.
UniqueFd ProcessBehind(const UniqueFd& socket);

// Either end of a link may use it first, and may then have to wait long for the other one. So both
// ends dial, and each serves its listeners in every wait. The higher rank dials at once. The lower
// rank does so a moment later, usually for nothing, because the higher rank has reached it. While
// the higher rank dials, it asks the lower one to dial again, so exactly one link is made. A dial
// waits at the peer's listener until the peer serves it, and fails when the peer has ended.
//
// Has no thread: the owner polls the descriptors from AppendPollFds together with its own for at
// most TimeoutMillis, and then calls Advance.
class LinkMaker {
 public:
  // The sockets of links are added to `sockets`, and keepalive ends a link after `silence`.
  LinkMaker(Contacts contacts, Reception reception, OwnedSockets sockets,
            std::chrono::milliseconds silence);

  // Begins to make the link to this rank, unless it is being made.
  void Begin(int peer);

  void AppendPollFds(std::vector<pollfd>& fds);
  int TimeoutMillis(int cap);

  // A link, or the reason why there is none.
  struct Outcome {
    int peer;
    Result<PeerSocket> link;
  };
  // Call it after poll, with the entries of the last AppendPollFds at the same indices. Returns
  // links of peers that dialed, too, whether or not Begin was called for them.
  std::vector<Outcome> Advance(const std::vector<pollfd>& fds);

 private:
  // The dialing of one peer. Not begun before `start`.
  struct PeerDial {
    bool local;
    Deadline start;
    std::optional<Dialing> dialing;
  };

  void AdvanceDials(const std::vector<pollfd>& fds, std::vector<Outcome>& outcomes);
  std::optional<Result<PeerSocket>> AdvanceDial(int peer, PeerDial& dial,
                                                const std::vector<pollfd>& fds);
  Dialing MakeDialing(int peer, bool local) const;
  PeerSocket Owned(UniqueFd connection, const LinkKeys& keys);

  const Contacts contacts_;
  Reception reception_;
  OwnedSockets sockets_;
  const std::chrono::milliseconds silence_;
  std::map<int, PeerDial> dials_;  // by peer
  size_t reception_begin_ = 0;     // index of its first descriptor
  size_t reception_end_ = 0;
  Deadline serve_by_ = Deadline::Never();
};

}  // namespace sparkhvd
