// Dials a listener that may have several addresses.
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
  std::vector<HostPort> addresses;  // preferred address first
  std::string unix_name;            // dialed instead of `addresses` if set
  std::string token;
  std::string purpose;
  uint64_t claim = 0;
  int buffer_bytes = 0;
  // Polled several times a second. A failure ends the dialing. May be empty.
  std::function<Status()> check;
  bool require_encryption = false;  // refuse an acceptor that does not encrypt
};

// Tries all addresses with staggered starts. Returns the first connection whose acceptor proves
// that it knows the token, because an address may be unroutable or lead to another listener. Dials
// a full listener again until the deadline. The failure names every address and its problem.
// `keys`, if set, receives the connection's keys.
Result<UniqueFd> Dial(const DialOptions& options, Deadline deadline, SessionKeys* keys = nullptr);

}  // namespace sparkhvd
