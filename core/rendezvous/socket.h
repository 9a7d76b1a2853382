// Non-blocking stream sockets, TCP and Unix: every wait on them has a deadline.
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

// Listens on `host` (a local address or a name of one); port 0 takes any. `buffer_bytes` sets the
// send and receive buffers of accepted connections, 0 leaves the kernel's default; so for all
// functions here.
Result<UniqueFd> ListenTcp(const HostPort& address, int buffer_bytes = 0);

// Listens on a name in the abstract namespace: no file, nothing left when the process ends.
Result<UniqueFd> ListenUnix(const std::string& name, int buffer_bytes = 0);

// The numeric addresses of a name, or the address itself. kTimeout when the name service is slow.
Result<std::vector<HostPort>> ResolveAll(const HostPort& address, Deadline deadline);

// A socket that connects to a numeric address: writable, or failed, once that is decided.
Result<UniqueFd> BeginConnectTcp(const HostPort& address, int buffer_bytes = 0);
Result<UniqueFd> ConnectTcp(const HostPort& address, Deadline deadline, int buffer_bytes = 0);
Result<UniqueFd> ConnectUnix(const std::string& name, Deadline deadline, int buffer_bytes = 0);

// Doubles this process's limit of descriptors, up to its hard limit; false when that is reached.
bool AllowMoreDescriptors();

// The numeric address to which a TCP socket is bound.
Result<HostPort> LocalAddress(int fd);
// The address of its peer.
Result<HostPort> PeerAddress(int fd);

// How a host that vanished (no power, no network) differs from a slow or stopped process. The
// kernel of a stopped process still acknowledges keepalive probes on an idle link and probes of a
// full window. So there is no limit on the time of the other side, only on the silence of its host:
// the kernel's keepalive ends an idle link, and a waiting thread checks a HostWatch.
// (TCP_USER_TIMEOUT would also end links whose receiver does not read.)

// For links between ranks.
constexpr std::chrono::seconds kSilentLink(30);
// For links that are mostly idle: those of the rendezvous.
constexpr std::chrono::seconds kSilentRendezvous(9);

// No delay for small segments, and keepalive that ends a link after kSilentLink. Nothing on Unix
// sockets.
void TuneStream(int fd);
// After TuneStream: keepalive that ends the link after kSilentRendezvous.
void NoticeLostHost(int fd);

// Watches the host at the other end of one socket while data is unacknowledged; keepalive covers
// idle links.
class HostWatch {
 public:
  // To be called about once a second during a wait: whether the other host has left sent data
  // unacknowledged for `limit`.
  bool IsSilent(int fd, std::chrono::milliseconds limit);

 private:
  Deadline::Clock::time_point last_look_{};
  std::optional<Deadline::Clock::time_point> unanswered_since_;
};

// Waits for `events` (of poll); kTimeout at the deadline, kPeerLost when the other host is silent
// for kSilentRendezvous.
Status AwaitEvents(int fd, short events, Deadline deadline);

// Exactly these bytes. kPeerLost when the other side closes or resets the connection.
Status ReadExactly(int fd, Bytes data, Deadline deadline);
Status WriteExactly(int fd, ConstBytes data, Deadline deadline);

// One attempt without waiting: the number of bytes moved, 0 when the socket is not ready, or the
// failure as above.
Result<size_t> ReadSome(int fd, Bytes data);
Result<size_t> WriteSome(int fd, ConstBytes data);

}  // namespace sparkhvd
