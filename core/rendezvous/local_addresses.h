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

// Of all interfaces that are up, IPv4 before IPv6, without those that mean nothing on another host
// or link (link-local).
Result<std::vector<LocalInterfaceAddress>> LocalAddresses();

}  // namespace sparkhvd
