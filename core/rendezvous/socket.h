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

// The numeric addresses that a name stands for, itself where it is one. kTimeout when the name
// service is late.
Result<std::vector<HostPort>> ResolveAll(const HostPort& address, Deadline deadline);

// A socket on its way to a numeric address: writable, or failed, once that is decided.
Result<UniqueFd> BeginConnectTcp(const HostPort& address, int buffer_bytes = 0);
Result<UniqueFd> ConnectTcp(const HostPort& address, Deadline deadline, int buffer_bytes = 0);
Result<UniqueFd> ConnectUnix(const std::string& name, Deadline deadline, int buffer_bytes = 0);

// Doubles the number of descriptors that this process may have, as far as its hard limit permits;
// false when it is there.
bool AllowMoreDescriptors();

// The numeric address to which a TCP socket is bound.
Result<HostPort> LocalAddress(int fd);
// That of its other end.
Result<HostPort> PeerAddress(int fd);

// How a host that vanished (no power, no network) is told from a process that is slow or stopped.
// The kernel of a stopped process goes on to acknowledge: to keepalive probes while nothing is on
// its way, and to probes of a full window. So there are no limits on how long the other side may
// take, only on how long its host may be silent: the kernel's keepalive ends a link on which
// nothing is on its way, and whoever waits for a link asks a HostWatch. (TCP_USER_TIMEOUT would
// also end links whose receiver does not read.)

// For links between ranks.
constexpr std::chrono::seconds kSilentLink(30);
// For links on which little is ever on its way: those of the rendezvous.
constexpr std::chrono::seconds kSilentRendezvous(9);

// No delay for small segments, and keepalive that ends a link after kSilentLink. Nothing on Unix
// sockets.
void TuneStream(int fd);
// After TuneStream: keepalive that ends the link after kSilentRendezvous.
void NoticeLostHost(int fd);

// Watches the host at the other end of one socket. While nothing is on its way, that is left to
// keepalive.
class HostWatch {
 public:
  // To be asked about once a second while somebody waits: whether the other host has left
  // unanswered for `limit` what was sent to it.
  bool IsSilent(int fd, std::chrono::milliseconds limit);

 private:
  Deadline::Clock::time_point last_look_{};
  std::optional<Deadline::Clock::time_point> unanswered_since_;
};

// Waits until `events` (of poll) are there; kTimeout when they do not come, kPeerLost when the
// other host is silent for kSilentRendezvous.
Status AwaitEvents(int fd, short events, Deadline deadline);

// Exactly these bytes. kPeerLost when the other side closes or resets the connection.
Status ReadExactly(int fd, Bytes data, Deadline deadline);
Status WriteExactly(int fd, ConstBytes data, Deadline deadline);

// One attempt without waiting: the number of bytes moved, 0 when the socket is not ready, or the
// failure as above.
Result<size_t> ReadSome(int fd, Bytes data);
Result<size_t> WriteSome(int fd, ConstBytes data);

}  // namespace sparkhvd
