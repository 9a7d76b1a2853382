// Non-blocking TCP and Unix stream sockets. Every wait on them has a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

struct HostPort {
  std::string host;
  uint16_t port = 0;
};

std::string ToText(const HostPort& address);  // "127.0.0.1:4242", "[::1]:4242"

// Listens on `address`, whose host is a local address or its name. Port 0 takes any port. In all
// functions of this file, `buffer_bytes` sets the send and receive buffers, and 0 keeps the
// kernel's default.
Result<UniqueFd> ListenTcp(const HostPort& address, int buffer_bytes = 0);

// Listens on a name in the abstract namespace, which needs no file and disappears with the process.
Result<UniqueFd> ListenUnix(const std::string& name, int buffer_bytes = 0);

// Returns the numeric addresses of a name, or the address itself if it is numeric. Fails with
// kTimeout if the name service is slow.
Result<std::vector<HostPort>> ResolveAll(const HostPort& address, Deadline deadline);

// Returns a socket that is connecting to a numeric address. The socket becomes writable once the
// attempt has succeeded or failed.
Result<UniqueFd> BeginConnectTcp(const HostPort& address, int buffer_bytes = 0);
Result<UniqueFd> ConnectUnix(const std::string& name, Deadline deadline, int buffer_bytes = 0);

// Doubles this process's limit of descriptors, up to the hard limit. Returns false if the limit
// cannot be raised further.
bool AllowMoreDescriptors();

// Returns the numeric address to which a TCP socket is bound.
Result<HostPort> LocalAddress(int fd);
// Returns the address of the peer.
Result<HostPort> PeerAddress(int fd);

// These limits distinguish a host that vanished (no power, no network) from a slow or stopped
// process. The kernel of a stopped process still acknowledges keepalive probes on an idle link and
// probes of a full window. So a peer may take any time, and only the silence of its host is
// limited: keepalive ends an idle link, and a waiting thread checks a HostWatch. (TCP_USER_TIMEOUT
// would also end links whose receiver does not read.)

// For links between ranks, unless the job sets another limit.
constexpr std::chrono::seconds kSilentLink(30);
// For the rendezvous links, which are mostly idle.
constexpr std::chrono::seconds kSilentRendezvous(9);

bool IsUnixSocket(int fd);

// Disables the delay of small segments, and enables keepalive that ends a link after kSilentLink.
// Does nothing on Unix sockets.
void TuneStream(int fd);
// Makes keepalive end an idle link once the other host is silent for `silence`, in whole seconds,
// but not before 3 s: a single lost probe must not end a link. Call it after TuneStream. Does
// nothing on Unix sockets.
void LimitSilence(int fd, std::chrono::milliseconds silence);

inline constexpr char kSilentHost[] = "the other host has stopped responding";

// Watches the host at the other end of a socket while data is unacknowledged. Keepalive covers idle
// links.
class HostWatch {
 public:
  // Call it in every Interval(limit) of a wait. Returns whether the other host has left sent data
  // unacknowledged for `limit`.
  bool IsSilent(int fd, std::chrono::milliseconds limit);
  static std::chrono::milliseconds Interval(std::chrono::milliseconds limit);

 private:
  Deadline::Clock::time_point last_look_{};
  std::optional<Deadline::Clock::time_point> unanswered_since_;
};

// Waits for `events` (of poll). Fails with kTimeout at the deadline, and with kPeerLost if the
// other host is silent for kSilentRendezvous.
Status AwaitEvents(int fd, short events, Deadline deadline);

// Transfers exactly these bytes. Fails with kPeerLost when the peer closes or resets the
// connection.
Status ReadExactly(int fd, Bytes data, Deadline deadline);
Status WriteExactly(int fd, ConstBytes data, Deadline deadline);

// Tries once without waiting. Returns the number of bytes moved, or 0 if the socket is not ready.
// Fails like ReadExactly.
Result<size_t> ReadSome(int fd, Bytes data);
Result<size_t> WriteSome(int fd, ConstBytes data);

}  // namespace sparkhvd
