// Dials a listener that may have several addresses.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "rendezvous/handshake.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

struct DialOptions {
  std::vector<HostPort> addresses;  // preferred address first
  std::string unix_name;            // dialed instead of `addresses` if set
  std::string token;
  std::string purpose;
  uint64_t claim = 0;
  int buffer_bytes = 0;
  // Polled several times a second. A failure ends the dialing. May be empty.
  std::function<Status()> check;
  bool require_encryption = false;  // refuse an acceptor that does not encrypt
  // An address fails if it does not answer an attempt to connect within this time. If empty, only
  // the deadline and the kernel limit the wait.
  std::optional<std::chrono::milliseconds> answer_limit = std::nullopt;
};

// Tries all addresses with staggered starts. Keeps the first connection whose acceptor proves that
// it knows the token: an address may be unreachable or belong to another listener. Dials a full
// listener again until the deadline. The failure names every address and its problem.
//
// Has no thread: the owner polls the descriptors from AppendPollFds together with its own for at
// most TimeoutMillis, and then calls Advance. Only the constructor may wait, for a name service.
class Dialing {
 public:
  struct Connection {
    UniqueFd fd;
    SessionKeys keys;
  };

  // Never calls `check` of the options: the owner does its own checks between calls of Advance.
  Dialing(DialOptions options, Deadline deadline);
  Dialing(Dialing&&) noexcept;
  Dialing& operator=(Dialing&&) noexcept;
  ~Dialing();

  void AppendPollFds(std::vector<pollfd>& fds);
  int TimeoutMillis(int cap);
  // Call it after poll. `fds` contains the entries of the last AppendPollFds at the same indices.
  // Returns nothing while the dialing continues.
  std::optional<Result<Connection>> Advance(const std::vector<pollfd>& fds);
  // Returns whether any address has accepted a connection.
  bool answered() const;

 private:
  class Attempts;
  std::unique_ptr<Attempts> attempts_;
  size_t first_ = 0;  // index of the first descriptor of the attempts
};

// Dials and waits for the connection. If `keys` is not null, stores the keys of the connection
// there.
Result<UniqueFd> Dial(const DialOptions& options, Deadline deadline, SessionKeys* keys = nullptr);

}  // namespace sparkhvd
