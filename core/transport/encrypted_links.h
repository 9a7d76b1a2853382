// Encrypted connections, which their users see as plain sockets.
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

// The keys of one side.
struct LinkKeys {
  Digest sending;
  Digest receiving;
};

// Connects sockets of this process with those that leave the host: one thread encrypts outgoing and
// decrypts incoming data, in records
//
//   length of the content (4 bytes), content, tag (16 bytes)
//
// When one side ends, the thread ends the other side, too. A record that fails authentication ends
// both sides, because nothing after it can be trusted.
class EncryptedLinks {
 public:
  // Fails if OpenSSL is missing. A link ends once the other host is silent for longer than
  // `silence`.
  static Result<std::unique_ptr<EncryptedLinks>> Make(
      std::chrono::milliseconds silence = kSilentLink);
  // Sends the data that was written before the plain sockets were closed. Gives up after a second
  // in which no peer reads, and after the time `silence` altogether.
  ~EncryptedLinks();

  // Returns the plain end of `link`, a connected non-blocking socket. Add all links before Start.
  Result<UniqueFd> Add(UniqueFd link, const LinkKeys& keys);
  Status Start();

 private:
  class Tunnel;
  class Pump;
  EncryptedLinks();

  std::unique_ptr<Pump> pump_;
  std::thread thread_;
};

// Wraps a `transport` over sockets of `links`. The result destroys both in the right order.
std::unique_ptr<Transport> MakeEncryptedTransport(std::unique_ptr<EncryptedLinks> links,
                                                  std::unique_ptr<Transport> transport);

}  // namespace sparkhvd
