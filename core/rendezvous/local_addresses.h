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

// The addresses of all interfaces that are up, IPv4 before IPv6, except link-local ones, which mean
// nothing on another host or link.
Result<std::vector<LocalInterfaceAddress>> LocalAddresses();

}  // namespace sparkhvd
