// Tests that a link ends if the host of the peer stops responding, but not if only the peer's
// process stops reading.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous/blocking_dial.h"
#include "rendezvous/socket.h"
#include "transport/meshes.h"
#include "transport/message_header.h"
#include "transport/socket_transport.h"

namespace sparkhvd {
namespace {

// Well above half a second: the kernel acknowledges probes of a full window at most that often.
constexpr std::chrono::milliseconds kSilence(2500);
constexpr size_t kLargeMessage = size_t{64} << 20;  // bytes; more than both sockets can buffer

// Returns both ends of a TCP connection. `buffer_bytes` sets the buffers of the second end.
std::array<UniqueFd, 2> ConnectedPair(int buffer_bytes = 0) {
  auto listener = ListenTcp({"127.0.0.1", 0}, buffer_bytes);
  EXPECT_TRUE(listener.ok()) << listener.status().message();
  const HostPort address = LocalAddress(listener.value().get()).value();
  auto dialed = ConnectTcp(address, Late());
  EXPECT_TRUE(dialed.ok()) << dialed.status().message();
  EXPECT_TRUE(AwaitEvents(listener.value().get(), POLLIN, Late()).ok());
  UniqueFd accepted(
      ::accept4(listener.value().get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  TuneStream(accepted.get());
  return {std::move(dialed).value(), std::move(accepted)};
}

std::unique_ptr<Transport> MakeTransport(int rank, UniqueFd link) {
  std::vector<PeerSocket> peers(2);
  peers[static_cast<size_t>(1 - rank)].stream = std::move(link);
  return std::move(MakeSocketTransport(rank, std::move(peers), LinkCosts(), kSilence)).value();
}

// Simulates a host without power: the filter drops arriving data, so that the kernel acknowledges
// nothing.
void Silence(int fd) {
  sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program = {1, &nothing};
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), 0);
}

TEST(SilentHost, EndsTheLinkOfARankThatSends) {
  auto [near, far] = ConnectedPair();
  Silence(far.get());
  const auto transport = MakeTransport(0, std::move(near));
  const std::vector<std::byte> data(100);
  const auto ticket = transport->PostSend(1, ConstBytes(data.data(), data.size()));
  ASSERT_TRUE(ticket.ok());
  std::vector<std::byte> answer(100);
  const auto received = transport->PostReceive(1, Bytes(answer.data(), answer.size()));
  ASSERT_TRUE(received.ok());
  const Status status = transport->Wait(Span<const Ticket>(&received.value(), 1), Late());
  EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
  EXPECT_NE(status.message().find("lost rank 1: its host has stopped responding"),
            std::string::npos)
      << status.message();
}

TEST(SilentHost, IsDistinguishedFromAProcessThatDoesNotRead) {
  auto [near, far] = ConnectedPair();
  const auto sender = MakeTransport(0, std::move(near));
  const auto receiver = MakeTransport(1, std::move(far));
  std::vector<std::byte> data(kLargeMessage, std::byte{7});
  const auto ticket = sender->PostSend(1, ConstBytes(data.data(), data.size()));
  ASSERT_TRUE(ticket.ok());
  std::vector<std::byte> received(kLargeMessage);
  std::thread frozen([&] {
    // Reads nothing for much longer than a host may be silent. The receive window is full by then.
    std::this_thread::sleep_for(3 * kSilence);
    const auto theirs = receiver->PostReceive(0, Bytes(received.data(), received.size()));
    ASSERT_TRUE(theirs.ok());
    const Status status = receiver->Wait(Span<const Ticket>(&theirs.value(), 1), Late());
    EXPECT_TRUE(status.ok()) << status.message();
  });
  const Status status = sender->Wait(Span<const Ticket>(&ticket.value(), 1), Late());
  frozen.join();
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(std::memcmp(received.data(), data.data(), data.size()), 0);
}

// Sends a message to a peer that reads nothing yet. Returns its length on the link.
size_t SendUnread(Transport& transport) {
  const std::vector<std::byte> data(200'000);  // the sender's buffer takes all of it
  const auto ticket = transport.PostSend(1, ConstBytes(data.data(), data.size()));
  EXPECT_TRUE(ticket.ok());
  const Status status = transport.Wait(Span<const Ticket>(&ticket.value(), 1), Late());
  EXPECT_TRUE(status.ok()) << status.message();
  return data.size() + kMessageHeaderBytes;
}

TEST(ClosingTransport, DeliversItsDataToASlowReaderAndDoesNotWaitForADeadOne) {
  auto [near, far] = ConnectedPair(16384);
  auto closing = MakeTransport(0, std::move(near));
  const size_t sent = SendUnread(*closing);
  std::thread closer([&] { closing.reset(); });
  // Takes much longer than a second for everything, but never so long for the next bytes.
  size_t received = 0;
  std::array<std::byte, 4096> buffer;
  while (AwaitEvents(far.get(), POLLIN, Late()).ok()) {
    // Data for a socket that has been closed would reset the connection.
    if (received < sent / 2) (void)WriteSome(far.get(), ConstBytes(buffer.data(), 1));
    const auto count = ReadSome(far.get(), Bytes(buffer.data(), buffer.size()));
    if (!count.ok()) break;
    received += count.value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  closer.join();
  EXPECT_EQ(received, sent);
  auto [next, dead] = ConnectedPair(16384);
  closing = MakeTransport(0, std::move(next));
  SendUnread(*closing);
  closing.reset();
}

// Returns the TCP connections of this process.
std::vector<int> TcpConnections() {
  constexpr int kDescriptors = 1024;
  std::vector<int> found;
  for (int fd = 0; fd < kDescriptors; ++fd) {
    if (!IsUnixSocket(fd) && PeerAddress(fd).ok()) found.push_back(fd);
  }
  return found;
}

// Returns how long an idle connection may be silent before keepalive ends it.
std::chrono::seconds KeepaliveLimit(int fd) {
  std::array<int, 3> values{};
  const std::array<int, 3> names = {TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT};
  for (size_t i = 0; i < names.size(); ++i) {
    socklen_t size = sizeof(values[i]);
    EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, names[i], &values[i], &size), 0);
  }
  return std::chrono::seconds(values[0] + values[1] * values[2]);
}

TEST(SilentHost, IsLostAfterTheTimeoutOfTheJob) {
  for (const bool encrypt : {false, true}) {
    const std::vector<Mesh> meshes = Connect(2, [&](MeshOptions* options) {
      options->host_key = "host " + std::to_string(options->rank);
      options->shared_memory = false;
      options->encrypt = encrypt;
      options->host_timeout = kSilence;
    });
    const std::vector<int> connections = TcpConnections();
    ASSERT_FALSE(connections.empty());
    for (const int fd : connections) {
      EXPECT_EQ(KeepaliveLimit(fd), std::chrono::seconds(3));
      Silence(fd);
    }
    const std::vector<std::byte> data(100);
    ASSERT_TRUE(meshes[0].transport->PostSend(1, ConstBytes(data.data(), data.size())).ok());
    std::vector<std::byte> answer(100);
    const auto received = meshes[0].transport->PostReceive(1, Bytes(answer.data(), answer.size()));
    ASSERT_TRUE(received.ok());
    const Status lost = meshes[0].transport->Wait(Span<const Ticket>(&received.value(), 1),
                                                  Deadline::After(4 * kSilence));
    EXPECT_EQ(lost.code(), StatusCode::kPeerLost) << lost.message();
  }
}

TEST(SilentHost, IsProbedAtLeastTwiceAndOnlyOnTcp) {
  auto [near, far] = ConnectedPair();
  for (const int seconds : {1, 2, 3, 4, 5, 6, 9, 30}) {
    LimitSilence(near.get(), std::chrono::seconds(seconds));
    int probes = 0;
    socklen_t size = sizeof(probes);
    ASSERT_EQ(::getsockopt(near.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, &size), 0);
    EXPECT_GE(probes, 2);
    EXPECT_EQ(KeepaliveLimit(near.get()), std::chrono::seconds(std::max(3, seconds)));
  }
  std::array<int, 2> pair;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()), 0);
  const UniqueFd unix_end(pair[0]);
  const UniqueFd other_end(pair[1]);
  LimitSilence(unix_end.get(), std::chrono::seconds(2));
}

TEST(SilentHost, IsDetectedWithoutTcpUserTimeoutWhichWouldAlsoEndFullLinks) {
  auto [near, far] = ConnectedPair();
  LimitSilence(near.get(), kSilentRendezvous);
  for (const UniqueFd* end : {&near, &far}) {
    int milliseconds = -1;
    socklen_t size = sizeof(milliseconds);
    ASSERT_EQ(::getsockopt(end->get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &size), 0);
    EXPECT_EQ(milliseconds, 0);
    int on = 0;
    ASSERT_EQ(::getsockopt(end->get(), SOL_SOCKET, SO_KEEPALIVE, &on, &size), 0);
    EXPECT_NE(on, 0);
  }
  EXPECT_FALSE(HostWatch().IsSilent(near.get(), std::chrono::milliseconds(0)));
}

}  // namespace
}  // namespace sparkhvd
