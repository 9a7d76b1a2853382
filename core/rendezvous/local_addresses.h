// The addresses of this host.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace sparkhvd {

struct LocalInterfaceAddress {
  std::string interface;  // "eth0"
  std::string host;       // numeric
  bool loopback = false;
};

// Returns the addresses of all interfaces that are up, IPv4 before IPv6. Omits link-local
// addresses, which are not valid on another host or link.
Result<std::vector<LocalInterfaceAddress>> LocalAddresses();

}  // namespace sparkhvd
