#include "transport/encrypted_links.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/leak_check.h"
#include "base/link_cipher.h"
#include "base/thorough.h"
#include "rendezvous/socket.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

Digest Key(int seed) {
  Digest key;
  for (size_t i = 0; i < key.size(); ++i)
    key[i] = static_cast<std::byte>(static_cast<size_t>(seed) * 40 + i);
  return key;
}

std::pair<UniqueFd, UniqueFd> Pair() {
  std::array<int, 2> pair{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  return {UniqueFd(pair[0]), UniqueFd(pair[1])};
}

// One side: the plain end, and the end that replaces the network.
struct LinkEnd {
  std::unique_ptr<EncryptedLinks> links;
  UniqueFd plain;
  UniqueFd network;
};

LinkEnd MakeLinkEnd(const LinkKeys& keys) {
  auto made = EncryptedLinks::Make();
  EXPECT_TRUE(made.ok()) << made.status().message();
  LinkEnd side{std::move(made).value(), UniqueFd(), UniqueFd()};
  auto [link, network] = Pair();
  const int few_bytes = 1;  // the kernel raises this to its minimum
  EXPECT_EQ(::setsockopt(link.get(), SOL_SOCKET, SO_SNDBUF, &few_bytes, sizeof(few_bytes)), 0);
  auto plain = side.links->Add(std::move(link), keys);
  EXPECT_TRUE(plain.ok()) << plain.status().message();
  side.plain = std::move(plain).value();
  side.network = std::move(network);
  EXPECT_TRUE(side.links->Start().ok());
  return side;
}

std::string ReadText(int fd, size_t size) {
  std::string text(size, '\0');
  const Bytes bytes(reinterpret_cast<std::byte*>(text.data()), size);
  EXPECT_TRUE(ReadExactly(fd, bytes, Late()).ok());
  return text;
}

const LinkKeys kHere{Key(1), Key(2)};
const LinkKeys kThere{Key(2), Key(1)};

TEST(LinkCipher, MatchesThePublishedVector) {
  // AES-256-GCM with a key, a nonce and a block of zeros (case 14 of the GCM specification).
  auto library = CryptoLibrary::Load();
  ASSERT_TRUE(library.ok()) << library.status().message();
  auto cipher = LinkCipher::Make(library.value(), Digest{}, LinkCipher::Use::kSeal);
  ASSERT_TRUE(cipher.ok());
  const std::array<std::byte, 16> zeros{};
  std::array<std::byte, 32> sealed{};
  ASSERT_TRUE(cipher.value().Seal(ConstBytes(zeros.data(), 16), Bytes(sealed.data(), 32)).ok());
  std::string text;
  for (const std::byte value : sealed) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", std::to_integer<unsigned>(value));
    text += digits;
  }
  EXPECT_EQ(text, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919");
}

TEST(LinkCipher, NamesTheMissingLibrary) {
  const auto none = CryptoLibrary::Load({"libno-such-crypto.so.7"});
  EXPECT_EQ(none.status().code(), StatusCode::kIo);
  EXPECT_EQ(none.status().message(),
            "encryption needs OpenSSL's libno-such-crypto.so.7, which this host does not have; "
            "install OpenSSL on every host or turn encryption off");
}

TEST(EncryptedLinks, HideTheirContent) {
  LinkEnd here = MakeLinkEnd(kHere);
  LinkEnd there = MakeLinkEnd(kThere);
  const std::string text = "the gradient of the loss, again and again; ";
  std::string sent;
  while (sent.size() < 300'000) sent += text;
  std::string seen;
  std::thread wire([&] {  // the network: forwards and records data until the end
    std::array<std::byte, 50'000> buffer;
    while (AwaitEvents(here.network.get(), POLLIN, Late()).ok()) {
      auto count = ReadSome(here.network.get(), Bytes(buffer.data(), buffer.size()));
      if (!count.ok()) break;
      seen.append(reinterpret_cast<const char*>(buffer.data()), count.value());
      EXPECT_TRUE(
          WriteExactly(there.network.get(), ConstBytes(buffer.data(), count.value()), Late()).ok());
    }
    ::shutdown(there.network.get(), SHUT_WR);
  });
  std::thread writer([&] {
    EXPECT_TRUE(WriteExactly(here.plain.get(), AsBytes(sent), Late()).ok());
    here.plain.Reset();
  });
  EXPECT_TRUE(ReadText(there.plain.get(), sent.size()) == sent);
  std::byte more{};
  EXPECT_EQ(ReadExactly(there.plain.get(), Bytes(&more, 1), Late()).code(), StatusCode::kPeerLost)
      << "the end of the data arrives, too";
  writer.join();
  wire.join();
  EXPECT_GT(seen.size(), sent.size());
  EXPECT_EQ(seen.find("gradient"), std::string::npos);
}

size_t ResidentBytes() {
  std::ifstream pages("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  pages >> total >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(EncryptedLinks, UseMemoryOnlyWhileDataMoves) {
  constexpr size_t kLinks = 100;
  constexpr size_t kBytesPerEnd = size_t{64} << 10;
  const std::string sent(300'000, 'x');
  auto here = EncryptedLinks::Make();
  auto there = EncryptedLinks::Make();
  ASSERT_TRUE(here.ok() && there.ok());
  std::string received(sent.size(), '\0');  // one for all links: sanitizers keep freed memory
  const Bytes target(reinterpret_cast<std::byte*>(received.data()), received.size());
  const size_t before = ResidentBytes();
  std::vector<std::pair<UniqueFd, UniqueFd>> plain;
  for (size_t i = 0; i < kLinks; ++i) {
    auto [one, other] = Pair();
    auto first = here.value()->Add(std::move(one), kHere);
    auto second = there.value()->Add(std::move(other), kThere);
    ASSERT_TRUE(first.ok() && second.ok());
    plain.emplace_back(std::move(first).value(), std::move(second).value());
  }
  ASSERT_TRUE(here.value()->Start().ok() && there.value()->Start().ok());
  for (const auto& [writes, reads] : plain) {
    std::thread writer(
        [&, fd = writes.get()] { EXPECT_TRUE(WriteExactly(fd, AsBytes(sent), Late()).ok()); });
    EXPECT_TRUE(ReadExactly(reads.get(), target, Late()).ok());
    EXPECT_TRUE(received == sent);
    writer.join();
  }
  const size_t grown = ResidentBytes() - before;
  // The memory that ThreadSanitizer records for every address would count, too.
  if (!kThreadSanitizer) {
    EXPECT_LT(grown, 2 * kLinks * kBytesPerEnd);
  }
}

// Writes as much as the sockets and the records in between can hold.
std::string FillLink(const LinkEnd& end) {
  std::string sent;
  const std::string piece(10'000, 'x');
  pollfd writable{end.plain.get(), POLLOUT, 0};
  while (::poll(&writable, 1, 100) > 0) {
    const auto count = WriteSome(end.plain.get(), AsBytes(piece));
    EXPECT_TRUE(count.ok()) << count.status().message();
    sent.append(piece, 0, count.value());
  }
  return sent;
}

TEST(EncryptedLinks, LastDataReachesASlowReaderAndClosingDoesNotWaitForADeadOne) {
  LinkEnd here = MakeLinkEnd(kHere);
  LinkEnd there = MakeLinkEnd(kThere);
  const std::string sent = FillLink(here);
  here.plain.Reset();
  std::thread closing([&] { here.links.reset(); });
  // Takes much longer than a second for everything, but never so long for the next bytes.
  std::string received;
  std::thread slow([&] {
    std::array<std::byte, 10'000> buffer;
    while (AwaitEvents(here.network.get(), POLLIN, Late()).ok()) {
      const auto count = ReadSome(here.network.get(), Bytes(buffer.data(), buffer.size()));
      if (!count.ok()) break;
      EXPECT_TRUE(
          WriteExactly(there.network.get(), ConstBytes(buffer.data(), count.value()), Late()).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ::shutdown(there.network.get(), SHUT_WR);
  });
  EXPECT_TRUE(ReadText(there.plain.get(), sent.size()) == sent);
  slow.join();
  closing.join();
  LinkEnd dead = MakeLinkEnd(kHere);
  FillLink(dead);
  dead.plain.Reset();
  dead.links.reset();
}

TEST(EncryptedLinks, DetectAlteredRepeatedAndForgedData) {
  const auto record_of = [](const std::string& text) {
    LinkEnd here = MakeLinkEnd(kHere);
    EXPECT_TRUE(WriteExactly(here.plain.get(), AsBytes(text), Late()).ok());
    return ReadText(here.network.get(), 4 + text.size() + kCipherTagBytes);
  };
  const std::string good = record_of("hello");
  std::string altered = good;
  altered[6] = static_cast<char>(altered[6] ^ 1);
  const std::string huge = std::string("\xff\xff\xff\x7f", 4) + std::string(100, 'x');
  const std::string empty(4 + kCipherTagBytes, '\0');
  for (const std::string& bad : {altered, huge, empty, std::string(64, 'G')}) {
    LinkEnd there = MakeLinkEnd(kThere);
    EXPECT_TRUE(WriteExactly(there.network.get(), AsBytes(bad), Late()).ok());
    std::byte first{};
    EXPECT_EQ(ReadExactly(there.plain.get(), Bytes(&first, 1), Late()).code(),
              StatusCode::kPeerLost);
  }
  LinkEnd there = MakeLinkEnd(kThere);
  EXPECT_TRUE(WriteExactly(there.network.get(), AsBytes(good + good), Late()).ok());
  EXPECT_EQ(ReadText(there.plain.get(), 5), "hello");
  std::byte again{};
  EXPECT_EQ(ReadExactly(there.plain.get(), Bytes(&again, 1), Late()).code(), StatusCode::kPeerLost)
      << "the same record a second time";
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
