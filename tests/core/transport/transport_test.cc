// The contract that every Transport must meet.
#include "transport/transport.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/leak_check.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

using Buffer = std::vector<std::byte>;

Buffer Pattern(int from, int to, size_t size) {
  Buffer buffer(size);
  for (size_t i = 0; i < size; ++i) {
    buffer[i] =
        static_cast<std::byte>(i * 31 + static_cast<size_t>(from) * 7 + static_cast<size_t>(to));
  }
  return buffer;
}

ConstBytes View(const Buffer& buffer) { return ConstBytes(buffer.data(), buffer.size()); }
Bytes Writable(Buffer& buffer) { return Bytes(buffer.data(), buffer.size()); }

Status WaitFor(Transport& transport, const std::vector<Ticket>& tickets, Deadline deadline) {
  return transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
}

Ticket Posted(const Result<Ticket>& ticket) {
  EXPECT_TRUE(ticket.ok()) << ticket.status().message();
  return ticket.ok() ? ticket.value() : 0;
}

// Every rank sends to and receives from every other rank, and posts everything before the first
// wait.
void ExchangeAll(Transport& transport, size_t bytes) {
  const int rank = transport.rank();
  const auto count = static_cast<size_t>(transport.size());
  std::vector<Buffer> sent(count);
  std::vector<Buffer> received(count, Buffer(bytes));
  std::vector<Ticket> tickets;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == rank) continue;
    const auto index = static_cast<size_t>(peer);
    sent[index] = Pattern(rank, peer, bytes);
    tickets.push_back(Posted(transport.PostSend(peer, View(sent[index]))));
    tickets.push_back(Posted(transport.PostReceive(peer, Writable(received[index]))));
  }
  const Status status = WaitFor(transport, tickets, Late());
  ASSERT_TRUE(status.ok()) << "rank " << rank << ", " << bytes << " bytes: " << status.message();
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == rank) continue;
    ASSERT_TRUE(received[static_cast<size_t>(peer)] == Pattern(peer, rank, bytes))
        << bytes << " bytes from rank " << peer << " to rank " << rank;
  }
}

std::vector<Mesh> LinksInProcess(int size) {
  return InProcessMeshes(std::vector<int>(static_cast<size_t>(size), 0), false);
}
std::vector<Mesh> Unix(int size) { return Connect(size); }
std::vector<Mesh> Tcp(int size) {
  return Connect(size, [](MeshOptions* options) { options->host_key.clear(); });
}
std::vector<Mesh> TinyUnix(int size) {
  return Connect(size, [](MeshOptions* options) { options->socket_buffer_bytes = 1; });
}
std::vector<Mesh> TinyTcp(int size) {
  return Connect(size, [](MeshOptions* options) {
    // With smaller buffers, the kernel's silly-window avoidance sends one packet per 200 ms.
    options->socket_buffer_bytes = 16384;
    options->host_key.clear();
  });
}

std::vector<Mesh> Encrypted(int size) {
  return Connect(size, [](MeshOptions* options) {
    options->host_key.clear();
    options->encrypt = true;
  });
}
std::vector<Mesh> TinyEncrypted(int size) {
  return Connect(size, [](MeshOptions* options) {
    options->socket_buffer_bytes = 16384;
    options->host_key.clear();
    options->encrypt = true;
  });
}

std::vector<Mesh> Memory(int size) { return ConnectNeighbors(Connect(size)); }

class TransportContract : public testing::TestWithParam<MeshKind> {
 protected:
  std::vector<Mesh> Make(int size) const { return GetParam().make(size); }
  bool InOneProcess() const { return GetParam().make == LinksInProcess; }
};

TEST_P(TransportContract, CarriesEveryLengthBetweenEveryPair) {
  for (const int size : {1, 2, 3, 4, 8}) {
    auto meshes = Make(size);
    ForEachRank(size, [&](int rank) {
      Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
      EXPECT_EQ(transport.rank(), rank);
      EXPECT_EQ(transport.size(), size);
      for (const size_t bytes : {0, 1, 7, 8, 4096, 65537}) ExchangeAll(transport, bytes);
    });
  }
}

TEST_P(TransportContract, DoesNotDeadlockWhenBothSidesSendLargeMessages) {
  auto meshes = Make(3);
  const size_t bytes = GetParam().name[0] == 'T' ? (size_t{1} << 18) + 3 : (size_t{1} << 21) + 3;
  ForEachRank(3,
              [&](int rank) { ExchangeAll(*meshes[static_cast<size_t>(rank)].transport, bytes); });
}

TEST_P(TransportContract, KeepsTheOrderInWhichMessagesWerePosted) {
  auto meshes = Make(2);
  constexpr int kMessages = 500;
  ForEachRank(2, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    std::vector<Buffer> buffers;
    std::vector<Ticket> tickets;
    for (int i = 0; i < kMessages; ++i) {
      const auto bytes = static_cast<size_t>(i % 5);
      buffers.push_back(rank == 0 ? Pattern(i, 1, bytes) : Buffer(bytes));
    }
    for (Buffer& buffer : buffers) {
      tickets.push_back(Posted(rank == 0 ? transport.PostSend(1, View(buffer))
                                         : transport.PostReceive(0, Writable(buffer))));
    }
    const Status status = WaitFor(transport, tickets, Late());
    ASSERT_TRUE(status.ok()) << status.message();
    for (int i = 0; i < kMessages; ++i) {
      const auto index = static_cast<size_t>(i);
      EXPECT_EQ(buffers[index], Pattern(i, 1, buffers[index].size())) << "message " << i;
    }
  });
}

TEST_P(TransportContract, CompletesATicketWithoutTheOthers) {
  auto meshes = Make(2);
  Buffer first(4);
  Buffer second(4);
  const Buffer sent = Pattern(1, 0, 4);
  Transport& receiver = *meshes[0].transport;
  const Ticket early = Posted(receiver.PostReceive(1, Writable(first)));
  const Ticket late = Posted(receiver.PostReceive(1, Writable(second)));
  const Ticket one = Posted(meshes[1].transport->PostSend(0, View(sent)));
  EXPECT_TRUE(WaitFor(receiver, {early}, Late()).ok());
  EXPECT_EQ(first, sent);
  const Ticket two = Posted(meshes[1].transport->PostSend(0, View(sent)));
  EXPECT_TRUE(WaitFor(receiver, {late}, Late()).ok());
  EXPECT_EQ(second, sent);
  EXPECT_TRUE(WaitFor(*meshes[1].transport, {one, two}, Late()).ok());
  EXPECT_TRUE(WaitFor(receiver, {}, Soon()).ok());
}

TEST_P(TransportContract, NamesThePeerThatNeverSends) {
  auto meshes = Make(3);
  Buffer buffer(65536);
  Transport& transport = *meshes[0].transport;
  const Ticket ticket = Posted(transport.PostReceive(2, Writable(buffer)));
  const Status status = WaitFor(transport, {ticket}, Soon());
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(), "receive from rank 2: 0 of 65536 bytes when the deadline passed");
  // The transport stays broken and reports why.
  EXPECT_EQ(transport.PostReceive(1, Writable(buffer)).status().message(), status.message());
  EXPECT_EQ(WaitFor(transport, {}, Late()).message(), status.message());
}

TEST_P(TransportContract, NamesThePeerThatNeverReceives) {
  auto meshes = Make(2);
  const Buffer buffer(size_t{1} << 25);
  Transport& transport = *meshes[1].transport;
  const Ticket ticket = Posted(transport.PostSend(0, View(buffer)));
  const Status status = WaitFor(transport, {ticket}, Soon());
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message().find("send to rank 0: "), 0u) << status.message();
  EXPECT_NE(status.message().find(" of 33554432 bytes when the deadline passed"),
            std::string::npos);
}

TEST_P(TransportContract, WakesAtOnceWhenAPeerLeaves) {
  for (const bool sending : {false, true}) {
    auto meshes = Make(3);
    Buffer buffer(size_t{1} << 25);
    Transport& transport = *meshes[0].transport;
    const Ticket ticket = Posted(sending ? transport.PostSend(2, View(buffer))
                                         : transport.PostReceive(2, Writable(buffer)));
    auto waiter =
        std::async(std::launch::async, [&] { return WaitFor(transport, {ticket}, Late()); });
    meshes[2].transport.reset();
    const Status status = waiter.get();
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
    EXPECT_NE(status.message().find("lost rank 2: "), std::string::npos) << status.message();
  }
}

TEST_P(TransportContract, ReportsAPeerThatLeftWhileIdleAtTheNextWait) {
  auto meshes = Make(2);
  meshes[1].transport.reset();
  Buffer buffer(8);
  const Ticket ticket = Posted(meshes[0].transport->PostReceive(1, Writable(buffer)));
  const Status status = WaitFor(*meshes[0].transport, {ticket}, Late());
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_EQ(status.message(), "receive from rank 1: lost rank 1: it closed its links");
}

TEST_P(TransportContract, ContinuesWithTheOtherPeersWhenOneHasLeft) {
  auto meshes = Make(3);
  meshes[2].transport.reset();
  const Buffer sent = Pattern(0, 1, 100);
  Buffer received(100);
  const Ticket send = Posted(meshes[0].transport->PostSend(1, View(sent)));
  const Ticket receive = Posted(meshes[1].transport->PostReceive(0, Writable(received)));
  EXPECT_TRUE(WaitFor(*meshes[1].transport, {receive}, Late()).ok());
  EXPECT_TRUE(WaitFor(*meshes[0].transport, {send}, Late()).ok());
  EXPECT_EQ(received, sent);
}

TEST_P(TransportContract, AbortWakesTheWaiterAndSendsPeersTheReason) {
  auto meshes = Make(3);
  std::vector<Status> seen(3);
  std::atomic<int> ready{0};
  std::thread aborter;
  ForEachRank(3, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    Buffer buffer(64);
    const Ticket ticket = Posted(transport.PostReceive(rank == 1 ? 2 : 1, Writable(buffer)));
    if (++ready == 3) {
      aborter = std::thread(
          [&] { meshes[1].transport->Abort(Status(StatusCode::kMismatch, "shapes differ")); });
    }
    seen[static_cast<size_t>(rank)] = WaitFor(transport, {ticket}, Late());
  });
  aborter.join();
  EXPECT_EQ(seen[1].message(), "shapes differ");
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(seen[rank].code(), StatusCode::kMismatch);
    EXPECT_EQ(seen[rank].message(), "receive from rank 1: rank 1 aborted: shapes differ");
  }
  Buffer buffer(1);
  EXPECT_EQ(meshes[1].transport->PostSend(0, View(buffer)).status().message(), "shapes differ");
  meshes[1].transport->Abort(Status(StatusCode::kAborted, "again"));
  EXPECT_EQ(WaitFor(*meshes[1].transport, {}, Late()).message(), "shapes differ");
}

TEST_P(TransportContract, AbortArrivesDuringATransfer) {
  auto meshes = Make(2);
  std::atomic<int> rounds{0};
  std::thread aborter([&] {
    while (rounds.load() < 20) std::this_thread::yield();
    meshes[0].transport->Abort(Status(StatusCode::kAborted, "enough"));
  });
  ForEachRank(2, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    Buffer buffer(1 << 14);
    Status status;
    while (status.ok()) {
      auto ticket = rank == 0 ? transport.PostSend(1, View(buffer))
                              : transport.PostReceive(0, Writable(buffer));
      status = ticket.ok() ? WaitFor(transport, {ticket.value()}, Late()) : ticket.status();
      if (rank == 0) ++rounds;
    }
    EXPECT_NE(status.code(), StatusCode::kTimeout) << status.message();
    if (rank == 0) {
      EXPECT_EQ(status.message(), "enough");
    }
  });
  aborter.join();
}

TEST_P(TransportContract, DetectsADisagreementAboutALength) {
  auto meshes = Make(2);
  const Buffer sent(16);
  Buffer received(8);
  (void)Posted(meshes[0].transport->PostSend(1, View(sent)));
  const auto ticket = meshes[1].transport->PostReceive(0, Writable(received));
  const Status status =
      ticket.ok() ? WaitFor(*meshes[1].transport, {ticket.value()}, Late()) : ticket.status();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "rank 0 sent 16 bytes where 8 were expected");
}

TEST_P(TransportContract, ReceivesMessagesOfUnknownLengthBetweenOthers) {
  auto meshes = Make(2);
  const std::vector<size_t> lengths{0, 1, 64, 0, 65536, 65537, 3};
  ForEachRank(2, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    // Messages follow each other closely, so that one read could return several.
    std::vector<Buffer> buffers;
    std::vector<size_t> received(lengths.size(), 99);
    for (size_t i = 0; i < lengths.size(); ++i) {
      const bool exact = i % 3 == 2;
      buffers.push_back(rank == 0 ? Pattern(static_cast<int>(i), 1, lengths[i])
                                  : Buffer(exact ? lengths[i] : 65537));
    }
    std::vector<Ticket> tickets;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const bool exact = i % 3 == 2;
      tickets.push_back(
          Posted(rank == 0 ? transport.PostSend(1, View(buffers[i]))
                 : exact   ? transport.PostReceive(0, Writable(buffers[i]))
                           : transport.PostReceiveUpTo(0, Writable(buffers[i]), &received[i])));
    }
    const Status status = WaitFor(transport, tickets, Late());
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t i = 0; rank == 1 && i < lengths.size(); ++i) {
      EXPECT_EQ(received[i], i % 3 == 2 ? 99 : lengths[i]) << "message " << i;
      buffers[i].resize(lengths[i]);
      EXPECT_EQ(buffers[i], Pattern(static_cast<int>(i), 1, lengths[i])) << "message " << i;
    }
  });
}

TEST_P(TransportContract, RefusesAMessageThatIsLongerThanExpected) {
  auto meshes = Make(2);
  const Buffer sent(16);
  Buffer received(15);
  size_t length = 0;
  (void)Posted(meshes[0].transport->PostSend(1, View(sent)));
  const auto ticket = meshes[1].transport->PostReceiveUpTo(0, Writable(received), &length);
  const Status status =
      ticket.ok() ? WaitFor(*meshes[1].transport, {ticket.value()}, Late()) : ticket.status();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "rank 0 sent 16 bytes where at most 15 were expected");
}

TEST_P(TransportContract, NamesThePeerThatNeverSendsAMessageOfUnknownLength) {
  auto meshes = Make(2);
  Buffer buffer(8);
  size_t length = 0;
  Transport& transport = *meshes[0].transport;
  const Ticket ticket = Posted(transport.PostReceiveUpTo(1, Writable(buffer), &length));
  const Status status = WaitFor(transport, {ticket}, Soon());
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(), "receive from rank 1: 0 of at most 8 bytes when the deadline passed");
}

TEST_P(TransportContract, SendsTheReasonOfAnAbortToReceiversOfUnknownLengths) {
  auto meshes = Make(2);
  Buffer buffer(8);
  size_t length = 0;
  Transport& transport = *meshes[0].transport;
  const Ticket ticket = Posted(transport.PostReceiveUpTo(1, Writable(buffer), &length));
  meshes[1].transport->Abort(Status(StatusCode::kMismatch, "shapes differ"));
  EXPECT_EQ(WaitFor(transport, {ticket}, Late()).message(),
            "receive from rank 1: rank 1 aborted: shapes differ");
}

TEST_P(TransportContract, RefusesUnknownPeers) {
  auto meshes = Make(2);
  Buffer buffer(1);
  for (const int peer : {-1, 0, 2}) {
    EXPECT_EQ(meshes[0].transport->PostSend(peer, View(buffer)).status().code(),
              StatusCode::kInvalidArgument);
    size_t length = 0;
    EXPECT_EQ(meshes[0].transport->PostReceiveUpTo(peer, Writable(buffer), &length).status().code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(meshes[0].transport->PostReceive(peer, Writable(buffer)).status().message(),
              "rank 0 of 2 has no link to rank " + std::to_string(peer) +
                  "; a peer is another rank of the same job");
  }
}

TEST_P(TransportContract, LeavesNoThreadAndNoDescriptor) {
  {
    auto warm_up = Make(2);
  }
  const Holdings before = HoldingsBefore();
  {
    auto meshes = Make(3);
    ForEachRank(3,
                [&](int rank) { ExchangeAll(*meshes[static_cast<size_t>(rank)].transport, 99); });
    if (!InOneProcess()) {
      EXPECT_FALSE(before == Holdings());
    }
  }
  const Holdings after = HoldingsAfter(before);
  EXPECT_TRUE(before == after) << ToText(before) << " became " << ToText(after);
}

INSTANTIATE_TEST_SUITE_P(
    Transports, TransportContract,
    testing::Values(MeshKind{"InProcess", LinksInProcess}, MeshKind{"Unix", Unix},
                    MeshKind{"Tcp", Tcp}, MeshKind{"TinyUnix", TinyUnix},
                    MeshKind{"TinyTcp", TinyTcp}, MeshKind{"Encrypted", Encrypted},
                    MeshKind{"TinyEncrypted", TinyEncrypted}, MeshKind{"Memory", Memory}),
    KindName);

}  // namespace
}  // namespace sparkhvd
