#include "rendezvous/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/io_status.h"

namespace sparkhvd {
namespace {

constexpr int kBacklog = 4096;  // the kernel lowers it to net.core.somaxconn
constexpr double kOwnNameSeconds = 20.0;
constexpr int kSocketType = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

struct Resolution {
  int error = 0;
  Addresses list;
};

Resolution LookUp(const HostPort& address, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  return {error, Addresses(list)};
}

// getaddrinfo cannot be interrupted and may wait for a name server indefinitely. It therefore runs
// on a thread that owns all its data and is abandoned at the deadline. This is the only thread that
// is never joined.
std::optional<Resolution> LookUpName(const HostPort& address, int flags, Deadline deadline) {
  auto promise = std::make_shared<std::promise<Resolution>>();
  std::future<Resolution> answer = promise->get_future();
  std::thread([promise, address, flags] { promise->set_value(LookUp(address, flags)); }).detach();
  if (answer.wait_until(deadline.at()) != std::future_status::ready) return std::nullopt;
  return answer.get();
}

Result<Addresses> Resolve(const HostPort& address, int flags, Deadline deadline) {
  Resolution found = LookUp(address, flags | AI_NUMERICHOST);
  if (found.error == EAI_NONAME) {
    auto named = LookUpName(address, flags, deadline);
    if (!named) {
      return Status(StatusCode::kTimeout,
                    "the name service did not resolve host '" + address.host + "' in time");
    }
    found = std::move(*named);
  }
  if (found.error != 0) {
    return Status(StatusCode::kIo,
                  "host '" + address.host + "' has no address: " + ::gai_strerror(found.error));
  }
  return std::move(found.list);
}

Result<HostPort> Numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  const int error = ::getnameinfo(address, length, host.data(), host.size(), port.data(),
                                  port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) {
    return Status(StatusCode::kIo, std::string("getnameinfo: ") + ::gai_strerror(error));
  }
  return HostPort{host.data(), static_cast<uint16_t>(std::stoul(port.data()))};
}

void SetOption(int fd, int level, int name, int value) {
  // Ignores failures, because the data of a socket is correct without these options.
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

// Ends an idle link `silence` after the last answer. The first probe is sent after about a third of
// this time, and all probes must remain unanswered.
void SetKeepalive(int fd, std::chrono::milliseconds silence) {
  constexpr int64_t kLongest = 32767;  // seconds; the kernel's limit for each option
  const auto seconds =
      static_cast<int>(std::clamp<int64_t>((silence.count() + 999) / 1000, 3, kLongest));
  const int probes = seconds < 6 ? 2 : 3;
  const int interval = std::max(1, seconds * 2 / (3 * probes));
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, seconds - probes * interval);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
}

void SetBuffers(int fd, int bytes) {
  if (bytes <= 0) return;
  SetOption(fd, SOL_SOCKET, SO_SNDBUF, bytes);
  SetOption(fd, SOL_SOCKET, SO_RCVBUF, bytes);
}

Result<socklen_t> AbstractAddress(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof(address->sun_path)) {
    return Status(StatusCode::kInvalidArgument, "a Unix socket name has 1 to " +
                                                    std::to_string(sizeof(address->sun_path) - 1) +
                                                    " bytes, not " + std::to_string(name.size()));
  }
  // The leading zero byte makes the name abstract.
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Returns the number of bytes moved. EAGAIN counts as 0 bytes. The end of the peer is a failure.
Result<size_t> Moved(ssize_t count, const char* what) {
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0) return Status(StatusCode::kPeerLost, "the other side closed the connection");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return size_t{0};
  if (errno == ECONNRESET || errno == EPIPE || errno == ETIMEDOUT) {
    return Status(StatusCode::kPeerLost, std::string(what) + ": " + ErrorText(errno), errno);
  }
  return IoStatus(what, errno);
}

}  // namespace

std::string ToText(const HostPort& address) {
  const bool bracketed = address.host.find(':') != std::string::npos;
  return (bracketed ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

Result<UniqueFd> ListenTcp(const HostPort& address, int buffer_bytes) {
  const std::string what = "listen on " + ToText(address);
  auto found = Resolve(address, AI_PASSIVE, Deadline::AfterSeconds(kOwnNameSeconds));
  if (!found.ok()) return found.status().Annotate(what);
  const addrinfo& first = *found.value();
  UniqueFd fd(::socket(first.ai_family, kSocketType, 0));
  if (!fd.valid()) return IoStatus(what, errno);
  // A port that the user chose must be available again at once when the job restarts.
  if (address.port != 0) SetOption(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  SetBuffers(fd.get(), buffer_bytes);
  if (::bind(fd.get(), first.ai_addr, first.ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    return IoStatus(what, errno);
  }
  return fd;
}

Result<UniqueFd> ListenUnix(const std::string& name, int buffer_bytes) {
  sockaddr_un address;
  auto length = AbstractAddress(name, &address);
  if (!length.ok()) return length.status();
  UniqueFd fd(::socket(AF_UNIX, kSocketType, 0));
  if (!fd.valid()) return IoStatus("open a Unix socket", errno);
  SetBuffers(fd.get(), buffer_bytes);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length.value()) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    return IoStatus("listen on Unix socket @" + name, errno);
  }
  return fd;
}

Result<std::vector<HostPort>> ResolveAll(const HostPort& address, Deadline deadline) {
  auto found = Resolve(address, 0, deadline);
  if (!found.ok()) return found.status();
  std::vector<HostPort> all;
  for (const addrinfo* entry = found.value().get(); entry != nullptr; entry = entry->ai_next) {
    auto numeric = Numeric(entry->ai_addr, entry->ai_addrlen);
    if (numeric.ok()) all.push_back(std::move(numeric).value());
  }
  return all;
}

Result<UniqueFd> BeginConnectTcp(const HostPort& address, int buffer_bytes) {
  const Resolution found = LookUp(address, AI_NUMERICHOST);
  if (found.error != 0) {
    return Status(StatusCode::kInvalidArgument, "'" + address.host + "' is not a numeric address");
  }
  UniqueFd fd(::socket(found.list->ai_family, kSocketType, 0));
  if (!fd.valid()) return IoStatus("open a socket", errno);
  SetBuffers(fd.get(), buffer_bytes);
  if (::connect(fd.get(), found.list->ai_addr, found.list->ai_addrlen) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    return IoStatus("connect", errno);
  }
  return fd;
}

Result<UniqueFd> ConnectUnix(const std::string& name, Deadline deadline, int buffer_bytes) {
  sockaddr_un address;
  auto length = AbstractAddress(name, &address);
  if (!length.ok()) return length.status();
  UniqueFd fd(::socket(AF_UNIX, kSocketType, 0));
  if (!fd.valid()) return IoStatus("open a Unix socket", errno);
  SetBuffers(fd.get(), buffer_bytes);
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length.value()) != 0) {
    // A signal may interrupt a call after it has connected the socket. The next call reports that.
    if (errno == EINTR) continue;
    if (errno == EISCONN) break;
    if (errno != EAGAIN) return IoStatus("connect", errno);
    // The socket's backlog is full. It has room once the listener accepts, but poll cannot report
    // that.
    if (deadline.Expired()) {
      return Status(StatusCode::kTimeout, "connect: the listener's queue is full");
    }
    pollfd none{-1, 0, 0};
    (void)::poll(&none, 1, deadline.RemainingMillis(5));
  }
  return fd;
}

bool AllowMoreDescriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = std::min(2 * limit.rlim_cur, limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

Result<HostPort> LocalAddress(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return IoStatus("getsockname", errno);
  }
  return Numeric(reinterpret_cast<const sockaddr*>(&address), length);
}

Result<HostPort> PeerAddress(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return IoStatus("getpeername", errno);
  }
  return Numeric(reinterpret_cast<const sockaddr*>(&address), length);
}

bool IsUnixSocket(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

void TuneStream(int fd) {
  if (IsUnixSocket(fd)) return;
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetKeepalive(fd, kSilentLink);
}

void LimitSilence(int fd, std::chrono::milliseconds silence) {
  if (!IsUnixSocket(fd)) SetKeepalive(fd, silence);
}

std::chrono::milliseconds HostWatch::Interval(std::chrono::milliseconds limit) {
  return std::clamp(limit / 8, std::chrono::milliseconds(1), std::chrono::milliseconds(1000));
}

bool HostWatch::IsSilent(int fd, std::chrono::milliseconds limit) {
  // Observations from before this process was stopped are stale: the data may have been
  // acknowledged since.
  const auto longest_gap = std::min<std::chrono::milliseconds>(std::chrono::seconds(5), limit / 2);
  const auto now = Deadline::Clock::now();
  if (now - last_look_ > longest_gap) unanswered_since_.reset();
  last_look_ = now;
  tcp_info info{};
  socklen_t size = sizeof(info);
  // Every acknowledgement resets both counters to 0, even if the process on the other host reads
  // nothing.
  const bool unanswered = ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
                          (info.tcpi_retransmits > 0 || info.tcpi_probes > 0);
  if (!unanswered) {
    unanswered_since_.reset();
    return false;
  }
  if (!unanswered_since_) unanswered_since_ = now;
  return now - *unanswered_since_ >= limit;
}

Status AwaitEvents(int fd, short events, Deadline deadline) {
  HostWatch host;
  while (true) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.RemainingMillis());
    if (ready > 0) return Status();
    if (ready < 0 && errno != EINTR) return IoStatus("poll", errno);
    if (deadline.Expired()) return Status(StatusCode::kTimeout, "no answer before the deadline");
    if (ready == 0 && host.IsSilent(fd, kSilentRendezvous)) {
      return Status(StatusCode::kPeerLost, kSilentHost, ETIMEDOUT);
    }
  }
}

Result<size_t> ReadSome(int fd, Bytes data) {
  if (data.empty()) return size_t{0};
  return Moved(::recv(fd, data.data(), data.size(), 0), "receive");
}

Result<size_t> WriteSome(int fd, ConstBytes data) {
  if (data.empty()) return size_t{0};
  return Moved(::send(fd, data.data(), data.size(), MSG_NOSIGNAL), "send");
}

Status ReadExactly(int fd, Bytes data, Deadline deadline) {
  size_t done = 0;
  while (done < data.size()) {
    auto count = ReadSome(fd, data.Sub(done, data.size() - done));
    if (!count.ok()) return count.status();
    done += count.value();
    if (count.value() == 0) SHVD_TRY(AwaitEvents(fd, POLLIN, deadline));
  }
  return Status();
}

Status WriteExactly(int fd, ConstBytes data, Deadline deadline) {
  size_t done = 0;
  while (done < data.size()) {
    auto count = WriteSome(fd, data.Sub(done, data.size() - done));
    if (!count.ok()) return count.status();
    done += count.value();
    if (count.value() == 0) SHVD_TRY(AwaitEvents(fd, POLLOUT, deadline));
  }
  return Status();
}

}  // namespace sparkhvd
