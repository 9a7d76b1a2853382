// Faulty and hostile connections that a listening socket must survive.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "rendezvous/blocking_dial.h"
#include "rendezvous/handshake.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

using Dialer = std::function<Result<UniqueFd>()>;

// Returns true once the peer has closed the connection; ignores the data that it sends before.
inline bool IsDropped(const UniqueFd& fd, Deadline deadline) {
  std::array<std::byte, 256> buffer;
  while (!deadline.Expired()) {
    auto count = ReadSome(fd.get(), Bytes(buffer.data(), buffer.size()));
    if (!count.ok()) return true;
    if (count.value() == 0 && !AwaitEvents(fd.get(), POLLIN, deadline).ok()) return false;
  }
  return false;
}

inline void SendGarbage(const Dialer& dial) {
  auto fd = dial();
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  (void)WriteSome(fd.value().get(), AsBytes(std::string(200, 'G')));
  EXPECT_TRUE(IsDropped(fd.value(), Deadline::AfterSeconds(20)));
}

inline void SendEndlessly(const Dialer& dial) {
  auto fd = dial();
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  const std::string block(1 << 16, '\0');
  Status status;
  // This is far more than the socket buffers hold, so it ends because the peer closes the
  // connection.
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    status = WriteExactly(fd.value().get(), AsBytes(block), Deadline::AfterSeconds(20));
  }
  EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
}

inline void UseWrongToken(const Dialer& dial, const std::string& purpose) {
  auto fd = dial();
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  const Status status =
      DialHandshake(fd.value().get(), "wrong", purpose, 1, Deadline::AfterSeconds(20));
  EXPECT_EQ(status.code(), StatusCode::kAuthentication) << status.message();
}

// Records what a member sends to an acceptor, and replays it on a second connection.
inline void Replay(const Dialer& dial, const std::string& token, const std::string& purpose) {
  auto member = dial();
  ASSERT_TRUE(member.ok()) << member.status().message();
  // Forwards messages between the member and the acceptor, and records the two of the member.
  std::array<int, 2> pair;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
  const UniqueFd inner(pair[0]);
  const UniqueFd outer(pair[1]);
  const Deadline deadline = Deadline::AfterSeconds(20);
  std::vector<std::byte> hello(kHelloBytes);
  std::vector<std::byte> proof(kProofBytes);
  std::vector<std::byte> welcome(kWelcomeBytes);
  std::vector<std::byte> answer(kProofBytes);
  std::thread honest([&] {
    EXPECT_TRUE(DialHandshake(inner.get(), token, purpose, ~uint64_t{0}, deadline).ok());
  });
  const auto relay = [&](int from, int to, std::vector<std::byte>& message) {
    EXPECT_TRUE(ReadExactly(from, Bytes(message.data(), message.size()), deadline).ok());
    EXPECT_TRUE(WriteExactly(to, ConstBytes(message.data(), message.size()), deadline).ok());
  };
  relay(outer.get(), member.value().get(), hello);
  relay(member.value().get(), outer.get(), welcome);
  relay(outer.get(), member.value().get(), proof);
  relay(member.value().get(), outer.get(), answer);
  honest.join();

  auto again = dial();
  ASSERT_TRUE(again.ok()) << again.status().message();
  const int fd = again.value().get();
  ASSERT_TRUE(WriteExactly(fd, ConstBytes(hello.data(), hello.size()), deadline).ok());
  ASSERT_TRUE(ReadExactly(fd, Bytes(welcome.data(), welcome.size()), deadline).ok());
  ASSERT_TRUE(WriteExactly(fd, ConstBytes(proof.data(), proof.size()), deadline).ok());
  const Status end = ReadExactly(fd, Bytes(answer.data(), answer.size()), deadline);
  EXPECT_EQ(end.code(), StatusCode::kPeerLost) << "the recorded proof was accepted a second time";
}

}  // namespace sparkhvd
