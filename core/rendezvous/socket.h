// Non-blocking stream sockets, TCP and Unix: every wait on them has a deadline.
#pragma once

#include <cstdint>
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

// The numeric address to which a TCP socket is bound.
Result<HostPort> LocalAddress(int fd);
// That of its other end.
Result<HostPort> PeerAddress(int fd);

// No delay for small segments, and an end to links whose other host has vanished. Nothing on Unix
// sockets.
void TuneStream(int fd);
// After TuneStream: the same end within 9 s, for links on which nobody is ever slow to take what
// was sent.
void NoticeLostHost(int fd);

// Waits until `events` (of poll) are there; kTimeout when they do not come.
Status AwaitEvents(int fd, short events, Deadline deadline);

// Exactly these bytes. kPeerLost when the other side closes or resets the connection.
Status ReadExactly(int fd, Bytes data, Deadline deadline);
Status WriteExactly(int fd, ConstBytes data, Deadline deadline);

// One attempt without waiting: the number of bytes moved, 0 when the socket is not ready, or the
// failure as above.
Result<size_t> ReadSome(int fd, Bytes data);
Result<size_t> WriteSome(int fd, ConstBytes data);

}  // namespace sparkhvd
