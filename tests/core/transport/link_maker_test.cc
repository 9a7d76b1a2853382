// Tests links that are made when they are first used.
#include "transport/link_maker.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/leak_check.h"
#include "rendezvous/strangers.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

std::vector<Mesh> OverTcp(int size) {
  return Connect(size, [](MeshOptions* options) { options->host_key.clear(); });
}
std::vector<Mesh> OverUnix(int size) { return Connect(size); }
std::vector<Mesh> OverEncryptedTcp(int size) {
  return Connect(size, [](MeshOptions* options) {
    options->host_key.clear();
    options->encrypt = true;
  });
}

// Rank i and rank i + 2 of 5 ranks have no link from the start.
class LinksOnDemand : public testing::TestWithParam<MeshKind> {
 protected:
  std::vector<Mesh> Make(int size) const { return GetParam().make(size); }
};

Ticket PostByte(Transport& transport, int peer, std::byte* byte) {
  auto ticket = transport.PostReceive(peer, Bytes(byte, 1));
  EXPECT_TRUE(ticket.ok()) << ticket.status().message();
  return ticket.ok() ? ticket.value() : 0;
}

Status SendByte(Transport& transport, int peer, std::byte byte, Deadline deadline = Late()) {
  const auto ticket = transport.PostSend(peer, ConstBytes(&byte, 1));
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), deadline);
}

Status ReceiveByte(Transport& transport, int peer, std::byte* byte, Deadline deadline = Late()) {
  const auto ticket = transport.PostReceive(peer, Bytes(byte, 1));
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), deadline);
}

Status Swap(Transport& transport, int peer) {
  std::byte received{};
  const std::byte sent{static_cast<unsigned char>(transport.rank())};
  const auto receive = transport.PostReceive(peer, Bytes(&received, 1));
  SHVD_TRY(receive.status());
  const auto send = transport.PostSend(peer, ConstBytes(&sent, 1));
  SHVD_TRY(send.status());
  const std::array<Ticket, 2> tickets{receive.value(), send.value()};
  SHVD_TRY(transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), Late()));
  EXPECT_EQ(std::to_integer<int>(received), peer);
  return Status();
}

TEST_P(LinksOnDemand, AreMadeByPairsThatUseThemInAnyOrder) {
  for (int size = 4; size <= 9; ++size) {
    auto meshes = Make(size);
    ForEachRank(size, [&](int rank) {
      Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
      // Distance by distance, so that each link is first used beside others that exist.
      for (int distance = 1; distance < size; ++distance) {
        std::byte received{};
        const std::byte sent{static_cast<unsigned char>(rank)};
        const int from = (rank - distance + size) % size;
        const auto receive = transport.PostReceive(from, Bytes(&received, 1));
        const auto send = transport.PostSend((rank + distance) % size, ConstBytes(&sent, 1));
        ASSERT_TRUE(receive.ok() && send.ok());
        const std::array<Ticket, 2> tickets{receive.value(), send.value()};
        const Status status =
            transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), Late());
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(std::to_integer<int>(received), from);
      }
    });
  }
}

TEST_P(LinksOnDemand, AreMadeAlsoIfBothEndsDialAtTheSameTime) {
  for (int round = 0; round < 30; ++round) {
    auto meshes = Make(4);
    // The lower rank may post first, last or at the same time.
    std::atomic<int> turn{0};
    ForEachRank(4, [&](int rank) {
      const int peer = (rank + 2) % 4;
      if (round % 3 != 0) {
        const bool early = (rank < 2) == (round % 3 == 1);
        while (turn.load() < (early ? 0 : 2)) std::this_thread::yield();
        ++turn;
      }
      const Status status = Swap(*meshes[static_cast<size_t>(rank)].transport, peer);
      EXPECT_TRUE(status.ok()) << status.message();
    });
  }
}

// The other rank is in a wait, but not for this link.
TEST_P(LinksOnDemand, AreMadeByARankThatWaitsForAnother) {
  for (const bool higher_first : {false, true}) {
    auto meshes = Make(4);
    const int first = higher_first ? 2 : 0;
    const int second = 2 - first;
    Transport& waiting = *meshes[static_cast<size_t>(second)].transport;
    std::byte from_neighbor{};
    auto other =
        std::async(std::launch::async, [&] { return ReceiveByte(waiting, 1, &from_neighbor); });
    EXPECT_TRUE(SendByte(*meshes[static_cast<size_t>(first)].transport, second, std::byte{7}).ok());
    EXPECT_TRUE(SendByte(*meshes[1].transport, second, std::byte{8}).ok());
    EXPECT_TRUE(other.get().ok());
    std::byte received{};
    EXPECT_TRUE(ReceiveByte(waiting, first, &received).ok());
    EXPECT_EQ(received, std::byte{7});
  }
}

TEST_P(LinksOnDemand, NameAPeerThatHasLeft) {
  for (const int peer : {0, 2}) {
    auto meshes = Make(4);
    meshes[static_cast<size_t>(peer)].transport.reset();
    std::byte byte{};
    const Status status =
        ReceiveByte(*meshes[static_cast<size_t>(2 - peer)].transport, peer, &byte);
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
    const std::string name = std::to_string(peer);
    EXPECT_EQ(status.message().find("receive from rank " + name + ": lost rank " + name + ": it "),
              0u)
        << status.message();
  }
}

TEST_P(LinksOnDemand, NameAPeerThatLeavesOrAbortsDuringTheDial) {
  for (const bool aborts : {false, true}) {
    for (const int peer : {0, 2}) {
      auto meshes = Make(4);
      const Holdings before = Holdings();
      Transport& transport = *meshes[static_cast<size_t>(2 - peer)].transport;
      std::byte byte{};
      const Ticket ticket = PostByte(transport, peer, &byte);
      auto waiter = std::async(std::launch::async, [&] {
        return transport.Wait(Span<const Ticket>(&ticket, 1), Late());
      });
      // The dial stays at the listener, because the peer never serves it.
      while (CountEntries("/proc/self/fd") == before.descriptors) std::this_thread::yield();
      auto& leaver = meshes[static_cast<size_t>(peer)].transport;
      if (aborts) leaver->Abort(Status(StatusCode::kMismatch, "shapes differ"));
      if (!aborts) leaver.reset();
      const Status status = waiter.get();
      EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
      EXPECT_NE(status.message().find("lost rank " + std::to_string(peer)), std::string::npos)
          << status.message();
    }
  }
}

TEST_P(LinksOnDemand, EndTheDialWhenTheirRankAborts) {
  for (const int peer : {0, 2}) {
    auto meshes = Make(4);
    Transport& transport = *meshes[static_cast<size_t>(2 - peer)].transport;
    std::byte byte{};
    const Ticket ticket = PostByte(transport, peer, &byte);
    auto waiter = std::async(
        std::launch::async, [&] { return transport.Wait(Span<const Ticket>(&ticket, 1), Late()); });
    transport.Abort(Status(StatusCode::kAborted, "enough"));
    EXPECT_EQ(waiter.get().message(), "enough");
    std::byte other{};
    const Status lost = ReceiveByte(*meshes[static_cast<size_t>(peer)].transport, 2 - peer, &other);
    EXPECT_EQ(lost.code(), StatusCode::kPeerLost) << lost.message();
  }
}

TEST_P(LinksOnDemand, AreBoundedByTheDeadlineOfTheWait) {
  for (const int peer : {0, 2}) {
    auto meshes = Make(4);
    std::byte byte{};
    const std::string name = std::to_string(peer);
    EXPECT_EQ(ReceiveByte(*meshes[static_cast<size_t>(2 - peer)].transport, peer, &byte, Soon())
                  .message(),
              "receive from rank " + name + ": 0 of 1 bytes when the deadline passed");
    EXPECT_EQ(SendByte(*meshes[3].transport, 1, byte, Soon()).message(),
              "send to rank 1: 0 of 1 bytes when the deadline passed");
  }
}

TEST_P(LinksOnDemand, LeaveNoDescriptorBehind) {
  const Holdings before = HoldingsBefore();
  {
    auto meshes = Make(6);
    ForEachRank(6, [&](int rank) {
      EXPECT_TRUE(Swap(*meshes[static_cast<size_t>(rank)].transport, (rank + 3) % 6).ok());
    });
  }
  EXPECT_TRUE(HoldingsAfter(before) == before) << ToText(Holdings());
}

TEST_P(LinksOnDemand, NeedNoListenerOnceAllExist) {
  constexpr int kSize = 5;
  const Holdings before = HoldingsBefore();
  auto meshes = Make(kSize);
  ForEachRank(kSize, [&](int rank) {
    for (const int distance : {2, 3, 1, 4}) {
      Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
      std::byte received{};
      const std::byte sent{1};
      const auto receive =
          transport.PostReceive((rank - distance + kSize) % kSize, Bytes(&received, 1));
      const auto send = transport.PostSend((rank + distance) % kSize, ConstBytes(&sent, 1));
      const std::array<Ticket, 2> tickets{receive.value(), send.value()};
      ASSERT_TRUE(transport.Wait(Span<const Ticket>(tickets.data(), 2), Late()).ok());
    }
  });
  const int links = kSize * (kSize - 1);
  const int watches = GetParam().make == OverUnix ? links : 0;
  EXPECT_EQ(Holdings().descriptors - before.descriptors, links + watches + kSize);
}

// A forked child closes its copies of links that were made on demand, and of the listeners.
TEST_P(LinksOnDemand, AreClosedInAForkedChild) {
  auto meshes = Make(4);
  ForEachRank(4, [&](int rank) {
    EXPECT_TRUE(Swap(*meshes[static_cast<size_t>(rank)].transport, (rank + 2) % 4).ok());
  });
  const pid_t child = ::fork();
  if (child == 0) {
    for (const Mesh& mesh : meshes) mesh.sockets.CloseCopies();
    for (int fd = 3; fd < 1024; ++fd) {
      sockaddr_storage address{};
      socklen_t size = sizeof(address);
      if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) ::_exit(1);
    }
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child has a socket";
}

INSTANTIATE_TEST_SUITE_P(Kinds, LinksOnDemand,
                         testing::Values(MeshKind{"Tcp", OverTcp}, MeshKind{"Unix", OverUnix},
                                         MeshKind{"Encrypted", OverEncryptedTcp}),
                         KindName);

// Reads the addresses of the ranks from the store.
AddressRecord PublishedBy(KeyValueStore& store, int rank) {
  return DecodeAddressRecord(store.Get("test/address/" + std::to_string(rank), Late()).value())
      .value();
}

TEST(LinkMaker, IgnoresStrangersWhileLinksAreUsed) {
  constexpr int kSize = 4;
  InProcessStore store;
  std::vector<Mesh> meshes(kSize);
  ForEachRank(kSize, [&](int rank) {
    MeshOptions options = OptionsOf(rank, kSize);
    options.host_key.clear();
    meshes[static_cast<size_t>(rank)] = std::move(ConnectMesh(options, store, Late()).value());
  });
  const HostPort address = PublishedBy(store, 0).tcp[0];
  const Dialer dial = [&] { return ConnectTcp(address, Late()); };
  std::byte byte{};
  Transport& victim = *meshes[0].transport;
  auto waiter = std::async(std::launch::async, [&] { return ReceiveByte(victim, 2, &byte); });
  const auto half_open = dial();
  SendGarbage(dial);
  SendEndlessly(dial);
  UseWrongToken(dial, "mesh/test/0");
  Replay(dial, "secret", "mesh/test/0");
  // A member claims to be this rank, a rank that does not exist, or a watch.
  for (const uint64_t claim : {uint64_t{1} << 32, uint64_t{1} << 32 | 4, uint64_t{2} << 32 | 2}) {
    auto fd = dial();
    ASSERT_TRUE(fd.ok());
    EXPECT_TRUE(DialHandshake(fd.value().get(), "secret", "mesh/test/0", claim, Late()).ok());
    EXPECT_TRUE(IsDropped(fd.value(), Late()));
  }
  EXPECT_TRUE(SendByte(*meshes[2].transport, 0, std::byte{9}).ok());
  EXPECT_TRUE(waiter.get().ok());
  EXPECT_EQ(byte, std::byte{9});
}

TEST(LinkMaker, ServesManyDialsThatCameBeforeItsFirstWait) {
  constexpr int kSize = 40;
  auto meshes = OverTcp(kSize);
  std::atomic<int> posted{0};
  ForEachRank(kSize, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    if (rank != kSize / 2) {
      const std::byte sent{static_cast<unsigned char>(rank)};
      const auto ticket = transport.PostSend(kSize / 2, ConstBytes(&sent, 1));
      ASSERT_TRUE(ticket.ok());
      ++posted;
      const Status status = transport.Wait(Span<const Ticket>(&ticket.value(), 1), Late());
      EXPECT_TRUE(status.ok()) << status.message();
      return;
    }
    while (posted < kSize - 1) std::this_thread::yield();
    std::vector<std::byte> received(kSize);
    std::vector<Ticket> tickets;
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer != rank) tickets.push_back(PostByte(transport, peer, &received[size_t(peer)]));
    }
    const Status status =
        transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), Late());
    ASSERT_TRUE(status.ok()) << status.message();
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer != rank) {
        EXPECT_EQ(std::to_integer<int>(received[size_t(peer)]), peer);
      }
    }
  });
}

// Recursive doubling uses the links of log2(32) = 5 peers. Each has two ends.
TEST(LinkMaker, MakesOnlyTheLinksThatAreUsed) {
  constexpr int kSize = 32;
  const Holdings before = HoldingsBefore();
  auto meshes = OverTcp(kSize);
  ForEachRank(kSize, [&](int rank) {
    for (int distance = 1; distance < kSize; distance *= 2) {
      const Status status = Swap(*meshes[static_cast<size_t>(rank)].transport, rank ^ distance);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  });
  // The ring of the start has half of its links in common with the doubling: between 2i and 2i + 1.
  const int links = kSize * (5 + 1);
  const int listeners = kSize;
  const int wakes = kSize;
  EXPECT_EQ(Holdings().descriptors - before.descriptors, links + listeners + wakes);
}

int Listeners() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0) count += listens;
  }
  return count;
}

TEST(LinkMaker, IsNotNeededIfAllPairsMustBeKnown) {
  const auto connected = [](std::optional<std::chrono::milliseconds> answer_limit) {
    return Connect(4, [&](MeshOptions* options) {
      options->host_key.clear();
      options->answer_limit = answer_limit;
    });
  };
  {
    const auto meshes = connected(std::chrono::seconds(30));
    EXPECT_EQ(Listeners(), 0) << "all links exist";
  }
  const auto meshes = connected(std::nullopt);
  EXPECT_EQ(Listeners(), 4);
}

}  // namespace
}  // namespace sparkhvd
