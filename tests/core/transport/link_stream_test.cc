#include "transport/link_stream.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/link_cipher.h"
#include "base/thorough.h"
#include "rendezvous/socket.h"
#include "transport/meshes.h"
#include "transport/socket_transport.h"

namespace sparkhvd {
namespace {

constexpr size_t kHeadBytes = 4;  // of a record

Digest Key(int seed) {
  Digest key;
  for (size_t i = 0; i < key.size(); ++i)
    key[i] = static_cast<std::byte>(static_cast<size_t>(seed) * 40 + i);
  return key;
}

const LinkKeys kHere{Key(1), Key(2)};
const LinkKeys kThere{Key(2), Key(1)};

// The sockets hold only a few kilobytes.
std::pair<UniqueFd, UniqueFd> TinyPair() {
  std::array<int, 2> pair{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  const int few_bytes = 1;  // the kernel raises this to its minimum
  for (const int fd : pair) {
    EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &few_bytes, sizeof(few_bytes)), 0);
  }
  return {UniqueFd(pair[0]), UniqueFd(pair[1])};
}

LinkStream MakeStream(UniqueFd socket, const std::optional<LinkKeys>& keys) {
  auto stream = LinkStream::Make(std::move(socket), keys, std::make_shared<RecordBuffers>());
  EXPECT_TRUE(stream.ok()) << stream.status().message();
  return std::move(stream).value();
}

Bytes Writable(std::string& text) {
  return {reinterpret_cast<std::byte*>(text.data()), text.size()};
}

std::string Text(size_t size) {
  std::string text;
  while (text.size() < size) text += "the gradient of the loss " + std::to_string(text.size());
  text.resize(size);
  return text;
}

// Returns what `text` becomes on the network.
std::string RecordOf(LinkStream& stream, int network, const std::string& text) {
  EXPECT_EQ(stream.Write(AsBytes(text)).value(), text.size());
  std::string record(kHeadBytes + text.size() + kCipherTagBytes, 0);
  EXPECT_TRUE(ReadExactly(network, Writable(record), Late()).ok());
  return record;
}

// Moves data in both directions at once, in parts of random sizes.
void ExchangeInParts(LinkStream& here, LinkStream& there, const std::string& sent) {
  struct Direction {
    LinkStream* from;
    LinkStream* to;
    std::string received;
    size_t written = 0;
    size_t read = 0;
    std::pair<size_t, size_t> offer{0, 0};  // stays the same until it counts as written
  };
  std::array<Direction, 2> directions{Direction{&here, &there, std::string(sent.size(), 0)},
                                      Direction{&there, &here, std::string(sent.size(), 0)}};
  std::mt19937_64 random(1);
  const auto parts = [&](size_t left) {
    const size_t most = random() % 3 == 0 ? 100'000 : 50;
    const size_t head = std::min<size_t>(left, random() % 20);
    return std::pair<size_t, size_t>{head, std::min<size_t>(left - head, 1 + random() % most)};
  };
  while (directions[0].read < sent.size() || directions[1].read < sent.size()) {
    for (Direction& each : directions) {
      if (each.written < sent.size()) {
        if (!each.from->is_in_record()) each.offer = parts(sent.size() - each.written);
        const ConstBytes rest = AsBytes(sent).Sub(each.written, sent.size() - each.written);
        const auto [head, more] = each.offer;
        const auto count = each.from->Write(rest.Sub(0, head), rest.Sub(head, more));
        ASSERT_TRUE(count.ok()) << count.status().message();
        each.written += count.value();
      }
      if (each.read < sent.size()) {
        const auto [head, more] = parts(sent.size() - each.read);
        const Bytes rest = Writable(each.received).Sub(each.read, sent.size() - each.read);
        const auto count = each.to->Read(rest.Sub(0, head), rest.Sub(head, more));
        ASSERT_TRUE(count.ok()) << count.status().message();
        each.read += count.value();
      }
    }
  }
  EXPECT_TRUE(directions[0].received == sent);
  EXPECT_TRUE(directions[1].received == sent);
  EXPECT_FALSE(here.is_in_record());
}

TEST(LinkStream, CarriesBothDirectionsInPartsOfAnySize) {
  for (const bool encrypted : {false, true}) {
    auto [one, other] = TinyPair();
    LinkStream here = MakeStream(std::move(one), encrypted ? std::optional(kHere) : std::nullopt);
    LinkStream there =
        MakeStream(std::move(other), encrypted ? std::optional(kThere) : std::nullopt);
    ExchangeInParts(here, there, Text(1'000'000));
  }
}

TEST(LinkStream, HidesItsContent) {
  auto [link, network] = TinyPair();
  LinkStream here = MakeStream(std::move(link), kHere);
  std::string seen;
  for (int i = 0; i < 100; ++i) seen += RecordOf(here, network.get(), Text(1000));
  EXPECT_EQ(seen.find("gradient"), std::string::npos);
}

TEST(LinkStream, CountsBytesAsWrittenOnceTheirRecordHasLeft) {
  auto [one, other] = TinyPair();
  LinkStream here = MakeStream(std::move(one), kHere);
  LinkStream there = MakeStream(std::move(other), kThere);
  const std::string sent = Text(60'000);
  std::string received(sent.size(), 0);
  EXPECT_FALSE(here.is_in_record());
  EXPECT_EQ(here.Write(AsBytes(sent)).value(), 0u);
  EXPECT_TRUE(here.is_in_record());
  // The reader sees nothing of the record before it can check the whole.
  EXPECT_EQ(there.Read(Writable(received)).value(), 0u);
  size_t written = 0;
  size_t read = 0;
  while (written == 0 || read == 0) {
    if (written == 0) written = here.Write(AsBytes(sent)).value();
    if (read == 0) read = there.Read(Writable(received)).value();
  }
  EXPECT_EQ(written, sent.size());
  EXPECT_EQ(read, sent.size());
  EXPECT_FALSE(here.is_in_record());
  EXPECT_TRUE(received == sent);
}

// Returns the failure of a stream that receives `bytes` from the network after `texts`.
Status FailureAfter(const std::string& bytes, const std::vector<std::string>& texts) {
  auto [link, network] = TinyPair();
  LinkStream there = MakeStream(std::move(link), kThere);
  EXPECT_TRUE(WriteExactly(network.get(), AsBytes(bytes), Late()).ok());
  ::shutdown(network.get(), SHUT_WR);
  std::string received(100, 0);
  for (const std::string& text : texts) {
    EXPECT_EQ(there.Read(Writable(received)).value(), text.size());
    EXPECT_EQ(received.substr(0, text.size()), text);
  }
  auto count = there.Read(Writable(received));
  while (count.ok() && count.value() == 0) count = there.Read(Writable(received));
  EXPECT_FALSE(count.ok());
  EXPECT_EQ(there.Read(Writable(received)).status().message(), count.status().message());
  return count.status();
}

TEST(LinkStream, DetectsAlteredRepeatedReorderedAndForgedRecords) {
  auto [link, network] = TinyPair();
  LinkStream here = MakeStream(std::move(link), kHere);
  const std::string one = RecordOf(here, network.get(), "one");
  const std::string two = RecordOf(here, network.get(), "two");
  const auto flip = [&](size_t position) {
    std::string altered = one;
    altered[position] = static_cast<char>(altered[position] ^ 1);
    return altered;
  };
  const std::string huge = std::string("\xff\xff\xff\x7f", 4) + std::string(100, 'x');
  const std::string empty(kHeadBytes + kCipherTagBytes, '\0');
  // The length, the content and the tag are altered. A record with a shorter length is checked as
  // such; one with a longer length includes the next one.
  for (const std::string& bad : {flip(0), flip(2) + two, flip(kHeadBytes), flip(one.size() - 1),
                                 two + one, huge, empty, std::string(64, 'G')}) {
    EXPECT_EQ(FailureAfter(bad, {}).message(), "data from the link was altered in transit");
  }
  EXPECT_EQ(FailureAfter(one + one, {"one"}).code(), StatusCode::kAuthentication) << "repeated";
  EXPECT_EQ(FailureAfter(one + two + one, {"one", "two"}).code(), StatusCode::kAuthentication);
}

TEST(LinkStream, EndsBetweenAndWithinRecords) {
  auto [link, network] = TinyPair();
  LinkStream here = MakeStream(std::move(link), kHere);
  const std::string one = RecordOf(here, network.get(), "one");
  const std::string two = RecordOf(here, network.get(), "two");
  for (const size_t cut : {size_t{0}, size_t{2}, kHeadBytes, kHeadBytes + 1, two.size() - 1}) {
    const Status ended = FailureAfter(one + two.substr(0, cut), {"one"});
    EXPECT_EQ(ended.code(), StatusCode::kPeerLost);
    EXPECT_EQ(ended.message(), "it closed its links");
  }
}

size_t ResidentBytes() {
  std::ifstream pages("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  pages >> total >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(LinkStream, UsesMemoryOnlyWhileDataMoves) {
  constexpr size_t kLinks = 100;
  constexpr size_t kBytesPerEnd = size_t{16} << 10;
  const std::string sent = Text(200'000);
  const size_t before = ResidentBytes();
  const auto buffers = std::make_shared<RecordBuffers>();
  std::vector<std::pair<LinkStream, LinkStream>> links;
  for (size_t i = 0; i < kLinks; ++i) {
    auto [one, other] = TinyPair();
    auto here = LinkStream::Make(std::move(one), kHere, buffers);
    auto there = LinkStream::Make(std::move(other), kThere, buffers);
    ASSERT_TRUE(here.ok() && there.ok());
    links.emplace_back(std::move(here).value(), std::move(there).value());
  }
  for (auto& [here, there] : links) ExchangeInParts(here, there, sent);
  const size_t grown = ResidentBytes() - before;
  // The memory that ThreadSanitizer records for every address would count, too, and
  // AddressSanitizer keeps freed memory.
  if (!kSanitized) {
    EXPECT_LT(grown, 2 * kLinks * kBytesPerEnd);
  }
}

// The following tests look at a whole transport.

std::unique_ptr<Transport> MakeEncryptedTransport(int rank, UniqueFd link) {
  std::vector<PeerSocket> peers(2);
  PeerSocket& peer = peers[static_cast<size_t>(1 - rank)];
  peer.stream = std::move(link);
  peer.keys = rank == 0 ? kHere : kThere;
  auto transport = MakeSocketTransport(rank, std::move(peers));
  EXPECT_TRUE(transport.ok()) << transport.status().message();
  return std::move(transport).value();
}

Status Receive(Transport& transport, Bytes data) {
  const auto ticket = transport.PostReceive(1 - transport.rank(), data);
  if (!ticket.ok()) return ticket.status();
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), Late());
}

TEST(EncryptedTransport, ReportsAnAlteredRecord) {
  auto [link, network] = TinyPair();
  auto [other, other_network] = TinyPair();
  const auto sender = MakeEncryptedTransport(1, std::move(link));
  const auto receiver = MakeEncryptedTransport(0, std::move(other));
  const std::string text = Text(100);
  ASSERT_TRUE(sender->PostSend(0, AsBytes(text)).ok());
  std::array<std::byte, 1000> record;
  const auto count = ReadSome(network.get(), Bytes(record.data(), record.size()));
  ASSERT_TRUE(count.ok());
  record[20] ^= std::byte(1);
  ASSERT_TRUE(
      WriteExactly(other_network.get(), ConstBytes(record.data(), count.value()), Late()).ok());
  std::string received(text.size(), 0);
  const Status status = Receive(*receiver, Writable(received));
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_EQ(status.message(),
            "receive from rank 1: lost rank 1: data from the link was altered in transit");
}

TEST(EncryptedTransport, DeliversDataBeforeTheReasonOfAnAbort) {
  auto [one, other] = TinyPair();
  const auto sender = MakeEncryptedTransport(1, std::move(one));
  const auto receiver = MakeEncryptedTransport(0, std::move(other));
  const std::string text = Text(100);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(sender->PostSend(0, AsBytes(text)).ok());
  sender->Abort(Status(StatusCode::kMismatch, "shapes differ"));
  for (int i = 0; i < 3; ++i) {
    std::string received(text.size(), 0);
    EXPECT_TRUE(Receive(*receiver, Writable(received)).ok());
    EXPECT_EQ(received, text);
  }
  std::string received(text.size(), 0);
  EXPECT_EQ(Receive(*receiver, Writable(received)).message(),
            "receive from rank 1: rank 1 aborted: shapes differ");
}

TEST(EncryptedTransport, EndsWithoutAReasonInTheMiddleOfARecord) {
  auto [one, other] = TinyPair();
  const auto sender = MakeEncryptedTransport(1, std::move(one));
  const auto receiver = MakeEncryptedTransport(0, std::move(other));
  const std::string text = Text(50'000);  // one record, more than the sockets hold
  ASSERT_TRUE(sender->PostSend(0, AsBytes(text)).ok());
  sender->Abort(Status(StatusCode::kMismatch, "shapes differ"));
  std::string received(text.size(), 0);
  EXPECT_EQ(Receive(*receiver, Writable(received)).message(),
            "receive from rank 1: lost rank 1: it closed its links");
}

TEST(ConnectMesh, EncryptionDoesNotChangeTheExchangedData) {
  auto meshes = Connect(3, [](MeshOptions* options) {
    options->host_key.clear();
    options->encrypt = true;
  });
  ForEachRank(3, [&](int rank) {
    Transport& transport = *meshes[static_cast<size_t>(rank)].transport;
    std::vector<std::vector<std::byte>> received(3, std::vector<std::byte>(1'000'000));
    const std::vector<std::byte> sent(1'000'000, std::byte(rank + 1));
    std::vector<Ticket> tickets;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      auto& target = received[static_cast<size_t>(peer)];
      tickets.push_back(transport.PostSend(peer, ConstBytes(sent.data(), sent.size())).value());
      tickets.push_back(transport.PostReceive(peer, Bytes(target.data(), target.size())).value());
    }
    EXPECT_TRUE(transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), Late()).ok());
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      EXPECT_EQ(received[static_cast<size_t>(peer)],
                std::vector<std::byte>(1'000'000, std::byte(peer + 1)));
    }
    if (rank != 1) return;
    transport.Abort(Status(StatusCode::kAborted, "the data ran out"));
  });
  std::byte byte{};
  const auto ticket = meshes[0].transport->PostReceive(1, Bytes(&byte, 1));
  const Status status = meshes[0].transport->Wait(Span<const Ticket>(&ticket.value(), 1), Late());
  EXPECT_NE(status.message().find("the data ran out"), std::string::npos) << status.message();
}

TEST(ConnectMesh, RanksThatDisagreeAboutEncryptionGetAnError) {
  const auto results = TryConnect(2, [](MeshOptions* options) {
    options->host_key.clear();
    options->encrypt = options->rank == 1;
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), StatusCode::kMismatch);
    EXPECT_NE(result.status().message().find("ranks disagree about encryption: rank"),
              std::string::npos)
        << result.status().message();
  }
}

}  // namespace
}  // namespace sparkhvd
