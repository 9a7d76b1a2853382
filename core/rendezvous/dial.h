// Reaching a listener that has several addresses.
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
  std::string unix_name;            // dialed instead where it is given
  std::string token;
  std::string purpose;
  uint64_t claim = 0;
  int buffer_bytes = 0;
  // Asked several times a second; a failure ends the dialing. May be empty.
  std::function<Status()> check;
  bool require_encryption = false;  // whether an acceptor that does not encrypt is refused
};

// Tries all addresses, each a moment after the one before, and returns the connection over which
// the other side was first to prove that it knows the token: what counts is what routes, and that
// it leads to the right listener. A listener that has no room is dialed again until the deadline.
// The failure names every address with what is wrong with it. `keys` receives the connection's keys
// where it is given.
Result<UniqueFd> Dial(const DialOptions& options, Deadline deadline, SessionKeys* keys = nullptr);

}  // namespace sparkhvd
