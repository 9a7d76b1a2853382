// Attacks on frames, and the limits of a FrameServer.
#include "rendezvous/frames.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadlines.h"
#include "base/thorough.h"
#include "base/wire.h"
#include "rendezvous/dial.h"
#include "rendezvous/message_server.h"
#include "rendezvous/strangers.h"

namespace sparkhvd {
namespace {

constexpr FrameLimits kSmall = {1000, 30.0};

Digest KeyOf(char letter) {
  Digest key;
  key.fill(static_cast<std::byte>(letter));
  return key;
}

std::pair<UniqueFd, UniqueFd> Sockets() {
  std::array<int, 2> pair;
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  return {UniqueFd(pair[0]), UniqueFd(pair[1])};
}

FrameConnection Framed(UniqueFd fd, Side side, bool encrypt, FrameLimits limits = kSmall) {
  auto framed =
      FrameConnection::Make(std::move(fd), {KeyOf('d'), KeyOf('a'), encrypt}, side, limits);
  EXPECT_TRUE(framed.ok()) << framed.status().message();
  return std::move(framed).value();
}

std::string ReadBytes(int fd, size_t count) {
  std::string bytes(count, '\0');
  EXPECT_TRUE(
      ReadExactly(fd, Bytes(reinterpret_cast<std::byte*>(bytes.data()), count), Late()).ok());
  return bytes;
}

void WriteBytes(int fd, const std::string& bytes) {
  ASSERT_TRUE(WriteExactly(fd, AsBytes(bytes), Late()).ok());
}

// Runs with and without encryption.
class Frames : public testing::TestWithParam<bool> {
 protected:
  Frames() {
    auto [near, far] = Sockets();
    wire_ = std::move(far);
    sender_ = std::make_unique<FrameConnection>(Framed(std::move(near), Side::kDialer, GetParam()));
    auto [own, other] = Sockets();
    forge_ = std::move(other);
    receiver_ =
        std::make_unique<FrameConnection>(Framed(std::move(own), Side::kAcceptor, GetParam()));
  }

  static size_t FrameBytes(size_t payload) {
    return kFrameHeadBytes + payload + (GetParam() ? kCipherTagBytes : sizeof(Digest));
  }
  std::string Recorded(const std::string& payload) {
    EXPECT_TRUE(sender_->Send(AsBytes(payload), Late()).ok());
    return ReadBytes(wire_.get(), FrameBytes(payload.size()));
  }
  Result<std::string> Received() { return receiver_->Receive(Late()); }
  StatusCode CodeOfReceived() { return Received().status().code(); }

  std::unique_ptr<FrameConnection> sender_;
  UniqueFd wire_;   // the bytes of the sender
  UniqueFd forge_;  // the input of the receiver
  std::unique_ptr<FrameConnection> receiver_;
};

TEST_P(Frames, ArriveInOrder) {
  for (const std::string& payload : {std::string(), std::string("one"), std::string(1000, '2')}) {
    WriteBytes(forge_.get(), Recorded(payload));
    EXPECT_EQ(Received().value(), payload);
  }
}

TEST_P(Frames, HideTheirContentIfEncrypted) {
  EXPECT_EQ(Recorded("pay 1").find("pay 1") == std::string::npos, GetParam());
}

TEST_P(Frames, AreNotAcceptedTwice) {
  const std::string frame = Recorded("pay 1");
  WriteBytes(forge_.get(), frame + frame);
  EXPECT_EQ(Received().value(), "pay 1");
  EXPECT_EQ(CodeOfReceived(), StatusCode::kAuthentication);
}

TEST_P(Frames, AreNotAcceptedInAnotherOrder) {
  const std::string first = Recorded("pay 1");
  WriteBytes(forge_.get(), Recorded("pay 2") + first);
  EXPECT_EQ(CodeOfReceived(), StatusCode::kAuthentication);
}

TEST_P(Frames, AreNotAcceptedByTheirSender) {
  const std::string frame = Recorded("pay 1");
  WriteBytes(wire_.get(), frame);
  EXPECT_EQ(sender_->Receive(Late()).status().code(), StatusCode::kAuthentication);
}

TEST_P(Frames, AreNotAcceptedOnAnotherConnection) {
  auto [own, other] = Sockets();
  auto stranger = FrameConnection::Make(std::move(own), {KeyOf('x'), KeyOf('y'), GetParam()},
                                        Side::kAcceptor, kSmall);
  ASSERT_TRUE(stranger.ok());
  WriteBytes(other.get(), Recorded("pay 1"));
  EXPECT_EQ(stranger.value().Receive(Late()).status().code(), StatusCode::kAuthentication);
}

// Replaces, inserts and removes bytes at random. The seed is fixed, so a failure is reproducible.
TEST_P(Frames, AreNotAcceptedIfAnyByteIsChanged) {
  std::mt19937 random(20261125);
  const int rounds = Thorough() ? 2000 : 200;
  for (int round = 0; round < rounds; ++round) {
    auto [near, wire] = Sockets();
    auto [own, forge] = Sockets();
    FrameConnection sender = Framed(std::move(near), Side::kDialer, GetParam());
    FrameConnection receiver = Framed(std::move(own), Side::kAcceptor, GetParam());
    ASSERT_TRUE(sender.Send(AsBytes("pay 1"), Late()).ok());
    const std::string frame = ReadBytes(wire.get(), FrameBytes(5));
    std::string changed = frame;
    const size_t from = random() % frame.size();
    std::string content(random() % 4, '\0');
    for (char& letter : content) letter = static_cast<char>(random());
    changed.replace(from, random() % 4, content);
    if (changed.substr(0, frame.size()) == frame) continue;
    WriteBytes(forge.get(), changed);
    forge.Reset();
    const auto received = receiver.Receive(Late());
    ASSERT_FALSE(received.ok()) << "round " << round << ": " << received.value();
    EXPECT_TRUE(received.status().code() == StatusCode::kAuthentication ||
                received.status().code() == StatusCode::kPeerLost)
        << received.status().message();
  }
}

TEST_P(Frames, AreRefusedAboveTheLimitBeforeTheirPayloadArrives) {
  std::string head(kFrameHeadBytes, '\0');
  StoreLittleEndian(uint32_t{1001}, reinterpret_cast<std::byte*>(head.data()));
  WriteBytes(forge_.get(), head);
  const Status refused = Received().status();
  EXPECT_EQ(refused.code(), StatusCode::kAuthentication);
  EXPECT_EQ(refused.message(), "a frame announces 1001 bytes; the limit is 1000 bytes");
  EXPECT_EQ(sender_->Send(AsBytes(std::string(1001, 'x')), Late()).message(),
            "a frame of 1001 bytes exceeds the limit of 1000 bytes");
}

TEST_P(Frames, EndWithTheirConnection) {
  WriteBytes(forge_.get(), Recorded("last"));
  forge_.Reset();
  EXPECT_EQ(Received().value(), "last");
  EXPECT_EQ(CodeOfReceived(), StatusCode::kPeerLost);
}

TEST_P(Frames, MustBeCompleteInTime) {
  auto [own, other] = Sockets();
  FrameConnection receiver = Framed(std::move(own), Side::kAcceptor, GetParam(), {1000, 0.05});
  WriteBytes(other.get(), Recorded("a whole frame").substr(0, 10));
  EXPECT_EQ(receiver.Receive(Late()).status().code(), StatusCode::kTimeout);
  EXPECT_TRUE(receiver.IsFrameLate());
}

TEST_P(Frames, AreNotSentToAPeerThatNeverReads) {
  auto [near, far] = Sockets();
  FrameConnection sender =
      Framed(std::move(near), Side::kDialer, GetParam(), {size_t{8} << 20, 30.0});
  const Status late =
      sender.Send(AsBytes(std::string(size_t{8} << 20, 'x')), Deadline::AfterSeconds(0.05));
  EXPECT_EQ(late.code(), StatusCode::kTimeout);
  EXPECT_NE(late.message().find("the peer did not accept "), std::string::npos) << late.message();
}

INSTANTIATE_TEST_SUITE_P(All, Frames, testing::Bool(),
                         [](const auto& encrypt) { return encrypt.param ? "Encrypted" : "Plain"; });

TEST(AcceptHandshake, AgreesWithDialHandshakeAndRefusesStrangers) {
  for (const char* token : {"secret", "another"}) {
    auto [dialer, acceptor] = Sockets();
    Status dialed;
    std::thread thread(
        [&, fd = dialer.get()] { dialed = DialHandshake(fd, token, kMessagePurpose, 0, Late()); });
    const auto keys = AcceptHandshake(acceptor.get(), "secret", kMessagePurpose, Late());
    acceptor.Reset();
    thread.join();
    EXPECT_EQ(keys.ok(), dialed.ok());
    EXPECT_EQ(keys.ok(), std::string(token) == "secret");
  }
}

class Messages : public testing::Test {
 protected:
  void Start(bool encrypt = false) {
    auto server = MessageServer::Start({"127.0.0.1", 0}, "secret", encrypt, "messages");
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(server).value();
  }
  FrameConnection Member(FrameLimits limits = kMessageLimits) const {
    DialOptions options;
    options.addresses = {server_->address()};
    options.token = "secret";
    options.purpose = kMessagePurpose;
    SessionKeys keys;
    auto fd = Dial(options, Late(), &keys);
    EXPECT_TRUE(fd.ok()) << fd.status().message();
    return std::move(FrameConnection::Make(std::move(fd).value(), keys, Side::kDialer, limits))
        .value();
  }
  MessageEvent Next() const {
    auto event = server_->Next(Late());
    EXPECT_TRUE(event.ok()) << event.status().message();
    return std::move(event).value();
  }

  std::unique_ptr<MessageServer> server_;
};

TEST_F(Messages, AreAnsweredInAnyOrder) {
  Start();
  FrameConnection first = Member();
  ASSERT_TRUE(first.Send(AsBytes("one"), Late()).ok());
  const MessageEvent one = Next();
  FrameConnection second = Member();
  ASSERT_TRUE(second.Send(AsBytes("two"), Late()).ok());
  const MessageEvent two = Next();
  EXPECT_EQ(*one.message + *two.message, "onetwo");
  server_->Send(two.connection, std::make_shared<const std::string>("to two"));
  EXPECT_EQ(second.Receive(Late()).value(), "to two");
  server_->Send(one.connection, std::make_shared<const std::string>("to one"));
  EXPECT_EQ(first.Receive(Late()).value(), "to one");
}

TEST_F(Messages, OfOneConnectionWaitUntilTheFirstIsHandled) {
  Start();
  FrameConnection member = Member();
  ASSERT_TRUE(member.Send(AsBytes("one"), Late()).ok());
  ASSERT_TRUE(member.Send(AsBytes("two"), Late()).ok());
  const MessageEvent one = Next();
  EXPECT_EQ(server_->Next(Deadline::AfterSeconds(0.1)).status().code(), StatusCode::kTimeout);
  server_->Resume(one.connection, kNoLimit);
  EXPECT_EQ(*Next().message, "two");
}

TEST_F(Messages, ThatArrivedBeforeTheEndAreHandled) {
  Start();
  {
    FrameConnection member = Member();
    for (const char* text : {"one", "two"}) ASSERT_TRUE(member.Send(AsBytes(text), Late()).ok());
  }
  for (const char* text : {"one", "two"}) {
    const MessageEvent event = Next();
    ASSERT_TRUE(event.message) << event.end.message();
    EXPECT_EQ(*event.message, text);
    server_->Resume(event.connection, kNoLimit);
  }
  EXPECT_EQ(Next().end.code(), StatusCode::kPeerLost);
}

TEST_F(Messages, AreAnsweredWhileTheServerCloses) {
  Start();
  FrameConnection member = Member();
  ASSERT_TRUE(member.Send(AsBytes("one"), Late()).ok());
  const MessageEvent one = Next();
  std::thread closing([this] { server_->Close(20.0); });
  server_->Send(one.connection, std::make_shared<const std::string>("answer"));
  server_->Resume(one.connection, kNoLimit);
  EXPECT_EQ(member.Receive(Late()).value(), "answer");
  EXPECT_EQ(member.Receive(Late()).status().code(), StatusCode::kPeerLost);
  closing.join();
  EXPECT_EQ(server_->Next(Late()).status().code(), StatusCode::kShutDown);
}

TEST_F(Messages, OfASilentMemberEndWithATimeout) {
  Start();
  FrameConnection member = Member();
  ASSERT_TRUE(member.Send(AsBytes("one"), Late()).ok());
  server_->Resume(Next().connection, 0.05);
  EXPECT_EQ(Next().end.code(), StatusCode::kTimeout);
  EXPECT_EQ(member.Receive(Late()).status().code(), StatusCode::kPeerLost);
}

TEST_F(Messages, ThatAreForgedEndOnlyTheirConnection) {
  Start();
  FrameConnection other = Member();
  FrameConnection member = Member();
  ASSERT_TRUE(WriteExactly(member.fd(), AsBytes(std::string(100, '\0')), Late()).ok());
  EXPECT_EQ(Next().end.code(), StatusCode::kAuthentication);
  ASSERT_TRUE(other.Send(AsBytes("one"), Late()).ok());
  EXPECT_EQ(*Next().message, "one");
}

TEST_F(Messages, AreEncryptedIfTheServerDemandsIt) {
  Start(true);
  FrameConnection member = Member();
  ASSERT_TRUE(member.Send(AsBytes("one"), Late()).ok());
  const MessageEvent one = Next();
  EXPECT_EQ(*one.message, "one");
  server_->Send(one.connection, std::make_shared<const std::string>("answer"));
  EXPECT_EQ(member.Receive(Late()).value(), "answer");
}

TEST_F(Messages, AreAcceptedOnlyFromMembersOfTheSamePurpose) {
  Start();
  const Dialer dial = [this] { return ConnectTcp(server_->address(), Late()); };
  SendGarbage(dial);
  SendEndlessly(dial);
  UseWrongToken(dial, kMessagePurpose);
  Replay(dial, "secret", kMessagePurpose);
  auto fd = dial();
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(DialHandshake(fd.value().get(), "secret", "rendezvous", 0, Late()).code(),
            StatusCode::kAuthentication);
  FrameConnection member = Member();
  ASSERT_TRUE(member.Send(AsBytes("one"), Late()).ok());
  MessageEvent event = Next();
  while (!event.message) event = Next();  // the end of the replayed connection
  EXPECT_EQ(*event.message, "one");
}

}  // namespace
}  // namespace sparkhvd
