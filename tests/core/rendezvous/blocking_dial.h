// Connects to a listener and authenticates, one blocking step at a time. The product dials several
// addresses at once instead; see rendezvous/dial.h.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "base/io_status.h"
#include "rendezvous/handshake.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

// Connects to a numeric address.
inline Result<UniqueFd> ConnectTcp(const HostPort& address, Deadline deadline) {
  Result<UniqueFd> fd = BeginConnectTcp(address);
  SHVD_TRY(fd.status());
  SHVD_TRY(AwaitEvents(fd.value().get(), POLLOUT, deadline).Annotate("connect"));
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(fd.value().get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return IoStatus("connect", error);
  TuneStream(fd.value().get());
  return fd;
}

// Runs the whole handshake over a connected socket. Fails with kAuthentication if the acceptor does
// not know the token or refuses the dialer's proof.
inline Status DialHandshake(int fd, const std::string& token, const std::string& purpose,
                            uint64_t claim, Deadline deadline) {
  DialerHandshake handshake(token, purpose, claim);
  const auto hello = handshake.Start();
  SHVD_TRY(hello.status());
  SHVD_TRY(WriteExactly(fd, ConstBytes(hello.value().data(), hello.value().size()), deadline)
               .Annotate("handshake"));
  Welcome welcome{};
  SHVD_TRY(ReadExactly(fd, Bytes(welcome.data(), welcome.size()), deadline).Annotate("handshake"));
  const Digest proof = handshake.Prove(welcome);
  Digest answer{};
  Status status = WriteExactly(fd, ConstBytes(proof.data(), proof.size()), deadline);
  if (status.ok()) status = ReadExactly(fd, Bytes(answer.data(), answer.size()), deadline);
  if (status.code() == StatusCode::kPeerLost) return HandshakeRefused();
  SHVD_TRY(status.Annotate("handshake"));
  return handshake.Check(answer);
}

}  // namespace sparkhvd
