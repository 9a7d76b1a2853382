#include "rendezvous/strangers.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/deadlines.h"
#include "base/leak_check.h"
#include "rendezvous/dial.h"
#include "rendezvous/store_frames.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"

namespace sparkhvd {
namespace {

std::string Numbered(uint32_t number, const StoreRequest& request) {
  return EncodeRequestNumber(number) + EncodeStoreRequest(request);
}

class RendezvousServer : public testing::Test {
 protected:
  void Start(ReceptionLimits limits = {}) {
    auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret", limits);
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(server).value();
  }
  Dialer dial() const {
    return [this] { return ConnectTcp(server_->address(), Late()); };
  }
  FrameConnection Member() const {
    DialOptions options;
    options.addresses = {server_->address()};
    options.token = "secret";
    options.purpose = kStorePurpose;
    SessionKeys keys;
    auto fd = Dial(options, Late(), &keys);
    EXPECT_TRUE(fd.ok()) << fd.status().message();
    // One byte more than the server permits.
    const FrameLimits limits = {kStoreLimits.max_bytes + 1};
    return std::move(FrameConnection::Make(std::move(fd).value(), keys, Side::kDialer, limits))
        .value();
  }
  void ExpectServes() {
    auto client = TcpStoreClient::Connect({server_->address()}, "secret", Late());
    ASSERT_TRUE(client.ok()) << client.status().message();
    EXPECT_TRUE(client.value()->Set("alive", "yes", Late()).ok());
    EXPECT_EQ(client.value()->Get("alive", Late()).value(), "yes");
  }

  // Lets `count` members dial at the same moment.
  void ExpectAllGetIn(int count) {
    AllowDescriptors(4096);
    DialOptions options;
    options.addresses = {server_->address()};
    options.token = "secret";
    options.purpose = kStorePurpose;
    std::mutex mutex;
    std::multiset<std::string> failures;
    std::vector<UniqueFd> members;
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&] {
        auto dialed = Dial(options, Late());
        const std::lock_guard<std::mutex> lock(mutex);
        if (dialed.ok()) {
          members.push_back(std::move(dialed).value());
        } else {
          failures.insert(dialed.status().message());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(failures.empty()) << failures.size() << " of " << count << ": "
                                  << *failures.begin();
  }

  static void AllowDescriptors(rlim_t count) {
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = std::min(limit.rlim_max, std::max(limit.rlim_cur, count));
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }

  std::unique_ptr<TcpStoreServer> server_;
};

TEST_F(RendezvousServer, SurvivesGarbage) {
  Start();
  SendGarbage(dial());
  ExpectServes();
}

TEST_F(RendezvousServer, SurvivesAnEndlessStream) {
  Start();
  SendEndlessly(dial());
  ExpectServes();
}

TEST_F(RendezvousServer, SurvivesAWrongToken) {
  Start();
  UseWrongToken(dial(), kStorePurpose);
  ExpectServes();
}

TEST_F(RendezvousServer, SurvivesAWrongPurpose) {
  Start();
  auto fd = dial()();
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(DialHandshake(fd.value().get(), "secret", "mesh/x/0", 0, Late()).code(),
            StatusCode::kAuthentication);
  ExpectServes();
}

TEST_F(RendezvousServer, RefusesARecordedHandshake) {
  Start();
  Replay(dial(), "secret", kStorePurpose);
  ExpectServes();
}

TEST_F(RendezvousServer, DropsSilentConnections) {
  ReceptionLimits limits;
  limits.handshake_seconds = 0.05;
  Start(limits);
  auto silent = dial()();
  auto halfway = dial()();
  ASSERT_TRUE(silent.ok() && halfway.ok());
  (void)WriteSome(halfway.value().get(), AsBytes("shvd"));
  EXPECT_TRUE(IsDropped(silent.value(), Late()));
  EXPECT_TRUE(IsDropped(halfway.value(), Late()));
}

TEST_F(RendezvousServer, DropsAConnectionThatSendsByteByByte) {
  ReceptionLimits limits;
  limits.handshake_seconds = 0.2;
  Start(limits);
  auto slow = dial()();
  ASSERT_TRUE(slow.ok());
  bool dropped = false;
  for (int sent = 0; sent < static_cast<int>(kHelloBytes) - 1 && !dropped; ++sent) {
    const char letter = "shvd HS3"[sent % 8];
    (void)WriteSome(slow.value().get(), AsBytes(std::string(1, letter)));
    dropped = IsDropped(slow.value(), Deadline::AfterSeconds(0.02));
  }
  EXPECT_TRUE(dropped) << "the server waited for the whole hello";
}

TEST_F(RendezvousServer, DropsTheOldestOfManySilentConnections) {
  ReceptionLimits limits;
  limits.strangers = 4;
  limits.handshake_seconds = 600;
  Start(limits);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 40; ++i) {
    auto fd = dial()();
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    silent.push_back(std::move(fd).value());
  }
  ExpectServes();
  EXPECT_TRUE(IsDropped(silent.front(), Late()));
}

TEST_F(RendezvousServer, AdmitsHundredsOfMembersAtOnce) {
  Start();
  ExpectAllGetIn(512);
}

TEST_F(RendezvousServer, AdmitsMembersDespiteIdleStrangers) {
  ReceptionLimits limits;
  limits.handshake_seconds = 600;
  Start(limits);
  AllowDescriptors(4096);
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 500; ++i) {
    auto fd = dial()();
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    idle.push_back(std::move(fd).value());
  }
  ExpectAllGetIn(16);
}

// These strangers dial again as soon as they are dropped.
TEST_F(RendezvousServer, AdmitsMembersDespiteReconnectingStrangers) {
  ReceptionLimits limits;
  limits.strangers = 4;
  Start(limits);
  std::atomic<bool> enough{false};
  std::vector<std::thread> flood;
  for (int i = 0; i < 8; ++i) {
    flood.emplace_back([&] {
      while (!enough.load()) {
        auto fd = dial()();
        if (fd.ok()) (void)IsDropped(fd.value(), Deadline::AfterSeconds(1));
      }
    });
  }
  ExpectAllGetIn(16);
  enough.store(true);
  for (std::thread& thread : flood) thread.join();
}

TEST_F(RendezvousServer, AsksDroppedConnectionsToRetry) {
  ReceptionLimits limits;
  limits.strangers = 1;
  Start(limits);
  auto first = dial()();
  ASSERT_TRUE(first.ok());
  ExpectServes();
  std::array<std::byte, kWelcomeBytes> said;
  ASSERT_TRUE(ReadExactly(first.value().get(), Bytes(said.data(), said.size()), Late()).ok());
  EXPECT_TRUE(IsBusyNotice(ConstBytes(said.data(), said.size())));
}

TEST_F(RendezvousServer, EndsTheSessionOfAMemberThatBreaksTheProtocol) {
  Start();
  std::string key_is_longer = Numbered(1, {StoreRequestKind::kSet, "k", "v"});
  key_is_longer.pop_back();
  key_is_longer.pop_back();
  const std::vector<std::string> malformed = {
      "",
      "no",
      "short",
      Numbered(1, {static_cast<StoreRequestKind>(0), "k", "v"}),
      Numbered(1, {static_cast<StoreRequestKind>(77), "k", "v"}),
      Numbered(1, {StoreRequestKind::kGet, "k", "v"}),
      Numbered(1, {StoreRequestKind::kWithdraw, "", "v"}),
      Numbered(1, {StoreRequestKind::kSet, std::string(kMaxKeyBytes + 1, 'k'), "v"}),
      Numbered(1, {StoreRequestKind::kSet, "k", std::string(kMaxValueBytes + 1, 'v')}),
      key_is_longer,
  };
  for (const std::string& request : malformed) {
    FrameConnection member = Member();
    ASSERT_TRUE(member.Send(AsBytes(request), Late()).ok());
    EXPECT_EQ(member.Receive(Late()).status().code(), StatusCode::kPeerLost) << request.size();
  }
  ExpectServes();
}

TEST_F(RendezvousServer, EndsTheSessionOfAMemberThatUsesANumberTwiceAtOnce) {
  Start();
  FrameConnection member = Member();
  for (const uint32_t number : {1, 2, 2}) {
    const std::string get = Numbered(number, {StoreRequestKind::kGet, "never", ""});
    ASSERT_TRUE(member.Send(AsBytes(get), Late()).ok());
  }
  EXPECT_EQ(member.Receive(Late()).status().code(), StatusCode::kPeerLost);
  ExpectServes();
}

TEST_F(RendezvousServer, AnswersTheRequestsOfAMemberInAnyOrderUnlessTheyAreWithdrawn) {
  Start();
  FrameConnection member = Member();
  const auto send = [&](uint32_t number, const StoreRequest& request) {
    EXPECT_TRUE(member.Send(AsBytes(Numbered(number, request)), Late()).ok());
  };
  send(7, {StoreRequestKind::kGet, "b", ""});
  send(8, {StoreRequestKind::kGet, "b", ""});
  send(9, {StoreRequestKind::kGet, "a", ""});
  send(10, {StoreRequestKind::kWithdraw, "", EncodeRequestNumber(8)});
  send(11, {StoreRequestKind::kSet, "a", "first"});
  send(12, {StoreRequestKind::kWithdraw, "", EncodeRequestNumber(77)});
  send(13, {StoreRequestKind::kSet, "b", "second"});
  std::multiset<std::string> answers;
  for (int i = 0; i < 6; ++i) answers.insert(member.Receive(Late()).value());
  const auto answer = [](uint32_t number, const char* value) {
    return EncodeRequestNumber(number) + value;
  };
  EXPECT_EQ(answers,
            (std::multiset<std::string>{answer(7, "second"), answer(9, "first"), answer(10, ""),
                                        answer(11, ""), answer(12, ""), answer(13, "")}));
}

TEST_F(RendezvousServer, ForgetsMembersThatLeaveDuringARequest) {
  Start();
  const Holdings before = HoldingsBefore();
  for (int i = 0; i < 10; ++i) {
    FrameConnection waiting = Member();
    const std::string get = Numbered(1, {StoreRequestKind::kGet, "", ""});
    ASSERT_TRUE(waiting.Send(AsBytes(get), Late()).ok());
    FrameConnection half = Member();
    ASSERT_TRUE(WriteExactly(half.fd(), AsBytes(std::string("\5\0\0\0half", 8)), Late()).ok());
  }
  ExpectServes();
  // The server closes its ends a moment after the members have closed theirs.
  const Deadline deadline = Late();
  while (!(before == Holdings()) && !deadline.Expired()) ExpectServes();
  const Holdings after = HoldingsAfter(before);
  EXPECT_TRUE(before == after) << ToText(before) << " became " << ToText(after);
}

// Feeds random bytes to every decoder. The seed is fixed, so a failure is reproducible.
TEST(RendezvousDecoders, SurviveRandomBytes) {
  std::mt19937 random(20261121);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> bytes(random() % 80);
    for (std::byte& value : bytes) value = static_cast<std::byte>(random() % (round % 2 ? 256 : 3));
    const ConstBytes view(bytes.data(), bytes.size());
    const auto request = DecodeStoreRequest(view);
    if (request.ok()) {
      const std::string again = EncodeStoreRequest(request.value());
      EXPECT_EQ(again, std::string(reinterpret_cast<const char*>(view.data()), view.size()));
    }
    AcceptorHandshake handshake("secret", "test");
    EXPECT_FALSE(handshake.Consume(view).ok());
    EXPECT_FALSE(handshake.done());
  }
}

TEST(Handshake, RefusesAnAcceptorThatDoesNotKnowTheToken) {
  std::array<int, 2> pair;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  const UniqueFd dialer(pair[0]);
  const UniqueFd impostor(pair[1]);
  // This acceptor returns the dialer's own proof, which is the best that it has.
  std::thread thread([&] {
    std::array<std::byte, kHelloBytes> hello;
    EXPECT_TRUE(ReadExactly(impostor.get(), Bytes(hello.data(), hello.size()), Late()).ok());
    std::array<std::byte, kProofBytes> proof;
    EXPECT_TRUE(WriteExactly(impostor.get(), ConstBytes(hello.data(), kWelcomeBytes), Late()).ok());
    EXPECT_TRUE(ReadExactly(impostor.get(), Bytes(proof.data(), proof.size()), Late()).ok());
    EXPECT_TRUE(WriteExactly(impostor.get(), ConstBytes(proof.data(), proof.size()), Late()).ok());
  });
  const Status status = DialHandshake(dialer.get(), "secret", "test", 0, Late());
  thread.join();
  EXPECT_EQ(status.code(), StatusCode::kAuthentication);
  EXPECT_EQ(status.message(), "the other side does not know the job's token");
}

// Neither side accepts random bytes in place of a proof. The seed is fixed.
TEST(Handshake, RefusesRandomProofs) {
  std::mt19937 random(20261125);
  const auto fill = [&random](auto& message) {
    for (std::byte& value : message) value = static_cast<std::byte>(random());
  };
  for (int round = 0; round < 1000; ++round) {
    DialerHandshake dialer("secret", "test", 0);
    const Hello hello = dialer.Start().value();
    Welcome welcome;
    fill(welcome);
    (void)dialer.Prove(welcome);
    Digest proof;
    fill(proof);
    EXPECT_EQ(dialer.Check(proof).code(), StatusCode::kAuthentication);
    AcceptorHandshake acceptor("secret", "test");
    ASSERT_TRUE(acceptor.Consume(ConstBytes(hello.data(), hello.size())).ok());
    EXPECT_EQ(acceptor.Consume(ConstBytes(proof.data(), proof.size())).status().code(),
              StatusCode::kAuthentication);
    EXPECT_FALSE(acceptor.done());
  }
}

TEST(Handshake, DeliversTheClaimOfTheDialer) {
  std::array<int, 2> pair;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  const UniqueFd dialer(pair[0]);
  const UniqueFd acceptor(pair[1]);
  std::thread thread([&] {
    EXPECT_TRUE(DialHandshake(dialer.get(), "secret", "test", 0x123456789abcdef0, Late()).ok());
  });
  AcceptorHandshake handshake("secret", "test");
  while (!handshake.done()) {
    std::vector<std::byte> message(handshake.wanted());
    ASSERT_TRUE(ReadExactly(acceptor.get(), Bytes(message.data(), message.size()), Late()).ok());
    auto reply = handshake.Consume(ConstBytes(message.data(), message.size()));
    ASSERT_TRUE(reply.ok()) << reply.status().message();
    const ConstBytes sent(reply.value().data(), reply.value().size());
    ASSERT_TRUE(WriteExactly(acceptor.get(), sent, Late()).ok());
  }
  thread.join();
  EXPECT_EQ(handshake.claim(), 0x123456789abcdef0u);
}

}  // namespace
}  // namespace sparkhvd
