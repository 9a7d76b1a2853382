#include "rendezvous/local_addresses.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/io_status.h"

namespace sparkhvd {
namespace {

constexpr uint32_t kLinkLocal4 = 0xa9fe0000;  // 169.254.0.0/16
constexpr uint32_t kLinkLocal4Mask = 0xffff0000;

struct FreeInterfaces {
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};

bool IsLinkLocal(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  const auto* ipv4 = reinterpret_cast<const sockaddr_in*>(address);
  return (ntohl(ipv4->sin_addr.s_addr) & kLinkLocal4Mask) == kLinkLocal4;
}

bool IsUsable(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return false;
  const int family = entry.ifa_addr->sa_family;
  return (family == AF_INET || family == AF_INET6) && !IsLinkLocal(entry.ifa_addr);
}

}  // namespace

Result<std::vector<LocalInterfaceAddress>> LocalAddresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return IoStatus("list the network interfaces", errno);
  const std::unique_ptr<ifaddrs, FreeInterfaces> owned(list);
  std::vector<std::pair<int, LocalInterfaceAddress>> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (!IsUsable(*entry)) continue;
    const int family = entry->ifa_addr->sa_family;
    const auto size =
        static_cast<socklen_t>(family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    std::array<char, NI_MAXHOST> host{};
    if (::getnameinfo(entry->ifa_addr, size, host.data(), host.size(), nullptr, 0,
                      NI_NUMERICHOST) != 0) {
      continue;
    }
    found.push_back(
        {family, {entry->ifa_name, host.data(), (entry->ifa_flags & IFF_LOOPBACK) != 0}});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<LocalInterfaceAddress> addresses;
  for (auto& [family, address] : found) addresses.push_back(std::move(address));
  return addresses;
}

}  // namespace sparkhvd
