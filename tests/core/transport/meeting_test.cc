// Tests ranks that fail while the ranks connect, and addresses that do not lead to a rank.
#include "transport/meeting.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "rendezvous/dial.h"
#include "rendezvous/local_addresses.h"
#include "rendezvous/reception.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"
#include "transport/address_record.h"
#include "transport/memory_limit.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

std::unique_ptr<TcpStoreServer> StartServer() {
  auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret");
  EXPECT_TRUE(server.ok()) << server.status().message();
  return std::move(server).value();
}

std::unique_ptr<TcpStoreClient> ConnectTo(const TcpStoreServer& server) {
  auto client = TcpStoreClient::Connect({server.address()}, "secret", Late());
  EXPECT_TRUE(client.ok()) << client.status().message();
  return std::move(client).value();
}

TEST(Will, IsExecutedWhenItsConnectionEndsUnlessItIsWithdrawn) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto other = ConnectTo(*server);
  auto kept = client->LeaveWill("kept", "withdrawn", Late());
  ASSERT_TRUE(kept.ok()) << kept.status().message();
  kept.value()->Withdraw();
  auto lost = client->LeaveWill("lost", "is gone", Late());
  ASSERT_TRUE(lost.ok()) << lost.status().message();
  EXPECT_EQ(other->Get("lost", Soon()).status().code(), StatusCode::kTimeout) << "not yet";
  lost.value().reset();
  EXPECT_EQ(other->Get("lost", Late()).value(), "is gone");
  EXPECT_EQ(other->Get("kept", Soon()).status().code(), StatusCode::kTimeout);
  std::vector<Result<std::unique_ptr<Will>>> wills;
  for (const char* key : {"one", "two", "three"}) {
    wills.push_back(client->LeaveWill(key, key, Late()));
    ASSERT_TRUE(wills.back().ok()) << wills.back().status().message();
  }
  wills[1].value()->Withdraw();
  client->Close();
  EXPECT_EQ(other->Get("one", Late()).value(), "one");
  EXPECT_EQ(other->Get("three", Late()).value(), "three");
  EXPECT_EQ(other->Get("two", Soon()).status().code(), StatusCode::kTimeout);
}

TEST(Meeting, AWaitForOneRankEndsWithTheFailureOfAnother) {
  auto server = StartServer();
  auto first = ConnectTo(*server);
  auto second = ConnectTo(*server);
  Meeting waiting(*first, "test", 0, Late(), {});
  ASSERT_TRUE(waiting.Join().ok());
  auto answer = std::async(std::launch::async, [&] { return waiting.GetAll("address", {0, 3}); });
  {
    Meeting dying(*second, "test", 1, Late(), {});
    ASSERT_TRUE(dying.Join().ok());
  }
  const Status status = answer.get().status();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_EQ(status.message(),
            "lost rank 1: its process ended while the ranks were being connected");
  waiting.Leave();
}

TEST(Meeting, AllRanksReportTheFirstFailure) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  Meeting first(*client, "test", 0, Late(), {});
  Meeting second(*client, "test", 1, Late(), {});
  const Status cause(StatusCode::kIo, "rank 0 has no memory");
  EXPECT_EQ(first.Fail(cause).message(), cause.message());
  const Status seen = second.Fail(Status(StatusCode::kTimeout, "rank 0 did not come"));
  EXPECT_EQ(seen.code(), StatusCode::kIo);
  EXPECT_EQ(seen.message(), cause.message());
  EXPECT_EQ(second.GetAll("never", {0, 2}).status().message(), cause.message());
}

TEST(Meeting, NamesTheFirstMissingRankOfMany) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  Meeting meeting(*client, "test", 0, Soon(), {});
  for (const int rank : {0, 1, 3}) {
    ASSERT_TRUE(server->Set("test/address/" + std::to_string(rank), "", Late()).ok());
  }
  const Status status = meeting.GetAll("address", {0, 1000}).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "rank 0 waits for the address of rank 2: key 'test/address/2' was not set before the "
            "deadline");
  EXPECT_EQ(server->requests(), 3u) << "all addresses, a failure, and the missing addresses";
}

TEST(Meeting, AnInterruptionEndsAWait) {
  InProcessStore store;
  Meeting meeting(store, "test", 3, Late(),
                  [] { return Status(StatusCode::kAborted, "interrupted"); });
  EXPECT_EQ(meeting.GetAll("never", {0, 1}).status().message(), "rank 3: interrupted");
}

TEST(ConnectMesh, ARankThatDiesAfterPublishingItsAddressEndsTheWaitOfTheOthers) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto dying = ConnectTo(*server);
  auto other = ConnectTo(*server);
  auto zero = std::async(std::launch::async,
                         [&] { return ConnectMesh(OptionsOf(0, 3), *client, Late()).status(); });
  {
    Meeting two(*dying, "test", 2, Late(), {});
    ASSERT_TRUE(two.Join().ok());
    AddressRecord record;
    for (const char* key : {"address/1", "address/2"}) {
      ASSERT_TRUE(two.Set(key, EncodeAddressRecord(record)).ok());
    }
    // Rank 0 has reached the point at which it accepts.
    const AddressRecord own =
        DecodeAddressRecord(other->Get("test/address/0", Late()).value()).value();
    DialOptions dial{own.tcp, "", "secret", "mesh/test/0", (uint64_t{1} << 32) | 1, 0, {}, false};
    ASSERT_TRUE(Dial(dial, Late()).ok());
  }
  EXPECT_EQ(zero.get().message(),
            "lost rank 2: its process ended while the ranks were being connected");
}

TEST(ConnectMesh, ChoosesTheAddressThatRoutes) {
  // Every address of 127/8 belongs to this host, but nothing listens on the first one.
  const auto meshes = Connect(3, [](MeshOptions* options) {
    options->host_key.clear();
    options->bind_hosts = {"127.0.0.1", "127.0.0." + std::to_string(options->rank + 2)};
  });
  for (const Mesh& mesh : meshes) EXPECT_NE(mesh.transport, nullptr);
}

// A listener at `host` that knows the token.
class Member {
 public:
  explicit Member(const std::string& host) : Member(std::move(ListenTcp({host, 0})).value()) {}

  HostPort address() const { return address_; }
  // Serves until `done` is ready.
  void Serve(std::future<void> done) {
    std::vector<Admitted> admitted;
    while (done.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      for (Admitted& entry : reception_.Serve()) admitted.push_back(std::move(entry));
      std::vector<pollfd> fds;
      reception_.AppendPollFds(fds);
      (void)::poll(fds.data(), fds.size(), 10);
    }
  }

 private:
  explicit Member(UniqueFd listener)
      : address_(LocalAddress(listener.get()).value()),
        reception_(Own(std::move(listener)), "secret", "p") {}
  static std::vector<UniqueFd> Own(UniqueFd fd) {
    std::vector<UniqueFd> listeners;
    listeners.push_back(std::move(fd));
    return listeners;
  }
  HostPort address_;
  Reception reception_;
};

TEST(Dial, SkipsAddressesThatRefuseHangOrHaveAnotherToken) {
  Member member("127.0.0.1");
  std::promise<void> done;
  std::thread server([&] { member.Serve(done.get_future()); });
  auto silent = ListenTcp({"127.0.0.2", 0});
  const HostPort mute = LocalAddress(silent.value().get()).value();
  HostPort refusing = mute;
  refusing.host = "127.0.0.3";
  const DialOptions options{{refusing, mute, member.address()}, "", "secret", "p", 7, 0, {}, false};
  auto fd = Dial(options, Late());
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  EXPECT_EQ(ToText(PeerAddress(fd.value().get()).value()), ToText(member.address()));
  done.set_value();
  server.join();

  const DialOptions hopeless{{refusing, mute}, "", "secret", "p", 7, 0, {}, false};
  const Status status = Dial(hopeless, Deadline::AfterSeconds(0.3)).status();
  EXPECT_EQ(status.message(), ToText(refusing) + ": connect: Connection refused; " + ToText(mute) +
                                  ": connected, but no answer before the deadline");
}

TEST(Dial, FindsAllAddressesOfAName) {
  Member member("127.0.0.1");
  std::promise<void> done;
  std::thread server([&] { member.Serve(done.get_future()); });
  const DialOptions options{
      {{"localhost", member.address().port}}, "", "secret", "p", 7, 0, {}, false};
  const auto fd = Dial(options, Late());
  EXPECT_TRUE(fd.ok()) << fd.status().message();
  done.set_value();
  server.join();
  const DialOptions unknown{{{"no-such-host.invalid", 1}}, "", "secret", "p", 7, 0, {}, false};
  EXPECT_NE(Dial(unknown, Late()).status().message().find("host 'no-such-host.invalid'"),
            std::string::npos);
}

TEST(LocalAddresses, IncludeTheLoopback) {
  const auto addresses = LocalAddresses();
  ASSERT_TRUE(addresses.ok()) << addresses.status().message();
  bool found = false;
  for (const LocalInterfaceAddress& address : addresses.value()) {
    found = found || (address.host == "127.0.0.1" && address.loopback);
  }
  EXPECT_TRUE(found);
}

TEST(MemoryLimit, IsTheSmallestOfTheEnclosingGroups) {
  char folder[] = "/tmp/sparkhvd-cgroup-XXXXXX";
  const std::string root = ::mkdtemp(folder);
  const auto write = [&root](const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  };
  write("/pod/memory.max", "5000000\n");
  write("/pod/task/memory.max", "max\n");
  write("/memory/job/memory.limit_in_bytes", "7000\n");
  EXPECT_EQ(ControlGroupLimit("0::/pod/task\n", root), 5000000u);
  EXPECT_EQ(ControlGroupLimit("0::/elsewhere\n", root), ~uint64_t{0});
  EXPECT_EQ(ControlGroupLimit("3:cpu,memory:/job\n0::/pod\n", root), 7000u);
  EXPECT_EQ(ControlGroupLimit("no such line\n:\n\n", root), ~uint64_t{0});
  write("/memory.max", "42");
  EXPECT_EQ(ControlGroupLimit("0::/\n", root), 42u);
  EXPECT_GT(MemoryLimit().value(), 0u);
  std::filesystem::remove_all(root);
}

Status Receive(Transport& transport, int peer, size_t size) {
  std::vector<std::byte> data(size);
  const auto ticket = transport.PostReceive(peer, Bytes(data.data(), data.size()));
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), Late());
}

Status Send(Transport& transport, int peer, const std::vector<std::byte>& data) {
  const auto ticket = transport.PostSend(peer, ConstBytes(data.data(), data.size()));
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), Late());
}

TEST(SocketTransport, DataSentBeforeAnAbortReachesEvenASlowPeer) {
  auto meshes = Connect(2, [](MeshOptions* options) {
    options->host_key.clear();
    options->socket_buffer_bytes = 2048;
  });
  Transport& slow = *meshes[1].transport;
  const std::vector<std::byte> data(2000);
  EXPECT_TRUE(Send(slow, 0, data).ok()) << "stays unread at rank 0";
  EXPECT_TRUE(Send(*meshes[0].transport, 1, data).ok());
  EXPECT_TRUE(Send(*meshes[0].transport, 1, data).ok());
  meshes[0].transport->Abort(Status(StatusCode::kAborted, "enough"));
  // A send to a rank that has aborted may fail, but its earlier data must arrive.
  (void)slow.PostSend(0, ConstBytes(data.data(), 100));
  std::thread leaving([&] { meshes[0].transport.reset(); });
  EXPECT_TRUE(Receive(slow, 0, 2000).ok());
  EXPECT_TRUE(Receive(slow, 0, 2000).ok());
  leaving.join();
  const Status end = Receive(slow, 0, 1);
  EXPECT_NE(end.message().find("rank 0"), std::string::npos) << end.message();
  EXPECT_FALSE(end.ok());
}

}  // namespace
}  // namespace sparkhvd
