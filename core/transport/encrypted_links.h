// Connections on which everything is encrypted, as plain sockets for those who use them.
#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "rendezvous/socket.h"
#include "transport/transport.h"

namespace sparkhvd {

// Seen from one side.
struct LinkKeys {
  Digest sending;
  Digest receiving;
};

// Sits between sockets of this process and those that leave the host: one thread encrypts what goes
// out and decrypts what comes in, in records
//
//   length of the content (4 bytes), content, tag (16 bytes)
//
// An end on one side becomes an end on the other. So does a record that does not open: whatever its
// reason, nothing that comes after it can be trusted.
class EncryptedLinks {
 public:
  // Fails where OpenSSL is missing. A link ends once its other host is silent for longer than
  // `silence`.
  static Result<std::unique_ptr<EncryptedLinks>> Make(
      std::chrono::milliseconds silence = kSilentLink);
  // What was written before the plain sockets were closed still has a moment to leave.
  ~EncryptedLinks();

  // The plain end of `link`, a connected non-blocking socket. All links come before Start.
  Result<UniqueFd> Add(UniqueFd link, const LinkKeys& keys);
  Status Start();

 private:
  class Tunnel;
  class Pump;
  EncryptedLinks();

  std::unique_ptr<Pump> pump_;
  std::thread thread_;
};

// `transport` over sockets that `links` has made; ends both in the right order.
std::unique_ptr<Transport> MakeEncryptedTransport(std::unique_ptr<EncryptedLinks> links,
                                                  std::unique_ptr<Transport> transport);

}  // namespace sparkhvd
