#include "rendezvous/socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "rendezvous/blocking_dial.h"

namespace {

// How many calls of connect() fail with EINTR after the kernel has begun to connect.
std::atomic<int> interruptions{0};

}  // namespace

// Overrides libc's function.
extern "C" __attribute__((visibility("default"))) int connect(int fd, const sockaddr* address,
                                                              socklen_t length) {
  const auto result = ::syscall(SYS_connect, fd, address, length);
  if (interruptions.load() > 0 && interruptions.fetch_sub(1) > 0) {
    errno = EINTR;
    return -1;
  }
  return static_cast<int>(result);
}

namespace sparkhvd {
namespace {

TEST(Socket, ConnectsOverTcpWhenASignalInterrupts) {
  auto listener = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  const HostPort address = LocalAddress(listener.value().get()).value();
  interruptions.store(1);
  auto fd = ConnectTcp(address, Deadline::AfterSeconds(30));
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  EXPECT_EQ(interruptions.load(), 0) << "no call was interrupted";
  EXPECT_EQ(ToText(PeerAddress(fd.value().get()).value()), ToText(address));
}

TEST(Socket, ConnectsToAUnixSocketWhenSignalsInterrupt) {
  const std::string name = "sparkhvd-test-" + std::to_string(::getpid());
  auto listener = ListenUnix(name);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  for (const int times : {1, 2, 3}) {
    interruptions.store(times);
    auto fd = ConnectUnix(name, Deadline::AfterSeconds(30));
    EXPECT_TRUE(fd.ok()) << fd.status().message();
    EXPECT_EQ(interruptions.load(), 0) << "no call was interrupted";
  }
}

TEST(Socket, ReportsAFullQueueOfAUnixSocket) {
  const std::string name = "sparkhvd-test-" + std::to_string(::getpid());
  auto listener = ListenUnix(name);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  ASSERT_EQ(::listen(listener.value().get(), 0), 0);
  auto first = ConnectUnix(name, Deadline::AfterSeconds(30));
  ASSERT_TRUE(first.ok()) << first.status().message();
  auto second = ConnectUnix(name, Deadline::AfterSeconds(0));
  EXPECT_EQ(second.status().code(), StatusCode::kTimeout) << second.status().message();
}

}  // namespace
}  // namespace sparkhvd
