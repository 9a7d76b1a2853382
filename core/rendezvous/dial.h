// Dials a listener that has several addresses.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "rendezvous/handshake.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

struct DialOptions {
  std::vector<HostPort> addresses;  // the preferred one first
  std::string unix_name;            // dialed instead if set
  std::string token;
  std::string purpose;
  uint64_t claim = 0;
  int buffer_bytes = 0;
  // Polled several times a second; a failure ends the dialing. May be empty.
  std::function<Status()> check;
  bool require_encryption = false;  // whether to refuse an acceptor that does not encrypt
};

// Tries all addresses, with staggered starts, and returns the first connection whose other side
// proves that it knows the token: an address counts only if it can be routed and leads to the right
// listener. A full listener is dialed again until the deadline. The failure names every address and
// its problem. `keys`, if set, receives the connection's keys.
Result<UniqueFd> Dial(const DialOptions& options, Deadline deadline, SessionKeys* keys = nullptr);

}  // namespace sparkhvd
