// The contract of every KeyValueStore.
#include "rendezvous/key_value_store.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/leak_check.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"

namespace sparkhvd {
namespace {

Deadline Soon() { return Deadline::After(std::chrono::milliseconds(30)); }
Deadline Late() { return Deadline::AfterSeconds(30); }

// A store as two parties see it.
struct Parties {
  std::unique_ptr<TcpStoreServer> server;
  std::vector<std::unique_ptr<KeyValueStore>> owned;
  KeyValueStore* writer = nullptr;
  KeyValueStore* reader = nullptr;
};

Parties InProcess() {
  Parties parties;
  parties.owned.push_back(std::make_unique<InProcessStore>());
  parties.writer = parties.reader = parties.owned[0].get();
  return parties;
}

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

Parties TwoClients() {
  Parties parties;
  parties.server = StartServer();
  for (int i = 0; i < 2; ++i) parties.owned.push_back(ConnectTo(*parties.server));
  parties.writer = parties.owned[0].get();
  parties.reader = parties.owned[1].get();
  return parties;
}

Parties OneClient() {
  Parties parties = TwoClients();
  parties.reader = parties.writer;
  return parties;
}

Parties ServerWrites() {
  Parties parties = TwoClients();
  parties.writer = parties.server.get();
  return parties;
}

Parties ServerReads() {
  Parties parties = TwoClients();
  parties.reader = parties.server.get();
  return parties;
}

struct Entry {
  const char* name;
  Parties (*make)();
};

void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.name; }

class KeyValueStoreContract : public testing::TestWithParam<Entry> {};

TEST_P(KeyValueStoreContract, GivesBackWhatWasSet) {
  Parties parties = GetParam().make();
  const std::vector<std::string> values = {"", "x", std::string("a\0b", 3),
                                           std::string(100'001, 'y')};
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string key = "key/" + std::to_string(i);
    ASSERT_TRUE(parties.writer->Set(key, values[i], Late()).ok());
    auto value = parties.reader->Get(key, Late());
    ASSERT_TRUE(value.ok()) << value.status().message();
    EXPECT_EQ(value.value(), values[i]);
  }
}

TEST_P(KeyValueStoreContract, KeepsTheFirstValue) {
  Parties parties = GetParam().make();
  ASSERT_TRUE(parties.writer->Set("key", "first", Late()).ok());
  ASSERT_TRUE(parties.writer->Set("key", "second", Late()).ok());
  ASSERT_TRUE(parties.reader->Set("key", "third", Late()).ok());
  EXPECT_EQ(parties.reader->Get("key", Late()).value(), "first");
}

TEST_P(KeyValueStoreContract, NamesTheKeyThatNobodySets) {
  Parties parties = GetParam().make();
  const auto value = parties.reader->Get("lonely", Soon());
  EXPECT_EQ(value.status().code(), StatusCode::kTimeout);
  EXPECT_EQ(value.status().message(), "nobody set key 'lonely' before the deadline");
  ASSERT_TRUE(parties.writer->Set("lonely", "at last", Late()).ok());
  EXPECT_EQ(parties.reader->Get("lonely", Late()).value(), "at last");
}

TEST_P(KeyValueStoreContract, WaitsUntilSomebodySetsTheKey) {
  Parties parties = GetParam().make();
  std::vector<std::future<std::string>> waiters;
  for (int i = 0; i < 6; ++i) {
    waiters.push_back(std::async(std::launch::async, [&parties, i] {
      auto value = parties.reader->Get("later/" + std::to_string(i % 3), Late());
      return value.ok() ? value.value() : value.status().message();
    }));
  }
  // A thread that waits keeps no other one waiting, also on the same client.
  ASSERT_TRUE(parties.reader->Set("between", "1", Late()).ok());
  EXPECT_EQ(parties.reader->Get("between", Late()).value(), "1");
  for (int i = 2; i >= 0; --i) {
    ASSERT_TRUE(
        parties.writer->Set("later/" + std::to_string(i), "v" + std::to_string(i), Late()).ok());
  }
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(waiters[static_cast<size_t>(i)].get(), "v" + std::to_string(i % 3));
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, KeyValueStoreContract,
                         testing::Values(Entry{"InProcess", InProcess},
                                         Entry{"TwoClients", TwoClients},
                                         Entry{"OneClient", OneClient},
                                         Entry{"ServerWrites", ServerWrites},
                                         Entry{"ServerReads", ServerReads}),
                         [](const auto& entry) { return entry.param.name; });

TEST(TcpStore, WakesItsWaitersWhenTheServerGoes) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto waiter = std::async(std::launch::async, [&] { return client->Get("never", Late()); });
  // Its connection stands once the server has answered another one that was dialed later.
  ASSERT_TRUE(client->Set("other", "1", Late()).ok());
  const std::string address = ToText(server->address());
  server->Close();
  const Status status = waiter.get().status();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(
      status.message().find("get key 'never': the rendezvous server at " + address + " is gone"),
      std::string::npos)
      << status.message();
  EXPECT_EQ(client->Set("more", "1", Late()).code(), StatusCode::kPeerLost);
}

TEST(TcpStore, WakesLocalWaitersWhenItCloses) {
  auto server = StartServer();
  auto waiter = std::async(std::launch::async, [&] { return server->Get("never", Late()); });
  server->Close();
  EXPECT_EQ(waiter.get().status().code(), StatusCode::kPeerLost);
}

TEST(TcpStore, WakesItsCallersWhenTheClientIsClosed) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto waiter = std::async(std::launch::async, [&] { return client->Get("never", Late()); });
  ASSERT_TRUE(client->Set("other", "1", Late()).ok());
  client->Close();
  EXPECT_EQ(waiter.get().status().code(), StatusCode::kShutDown);
  EXPECT_EQ(client->Get("other", Late()).status().message(), "the rendezvous client was closed");
}

TEST(TcpStore, RefusesWhatIsTooLarge) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  const std::string key(kMaxKeyBytes + 1, 'k');
  const std::string value(kMaxValueBytes + 1, 'v');
  EXPECT_EQ(client->Set(key, "", Late()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Get(key, Late()).status().code(), StatusCode::kInvalidArgument);
  const Status refused = client->Set("big", value, Late());
  EXPECT_EQ(refused.message(),
            "the value of key 'big' has 16777217 bytes; a rendezvous value has at most 16777216, "
            "pass larger things through the Store");
  EXPECT_EQ(server->Set("big", value, Late()).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(client->Set("largest", value.substr(1), Late()).ok());
  EXPECT_EQ(client->Get("largest", Late()).value().size(), kMaxValueBytes);
}

TEST(TcpStore, TriesItsAddressesInOrder) {
  auto server = StartServer();
  HostPort dead;
  {
    auto gone = StartServer();
    dead = gone->address();
  }
  auto client = TcpStoreClient::Connect({dead, server->address()}, "secret", Late());
  ASSERT_TRUE(client.ok()) << client.status().message();
  EXPECT_TRUE(client.value()->Set("key", "1", Late()).ok());
  auto none = TcpStoreClient::Connect({dead}, "secret", Late());
  EXPECT_EQ(none.status().message(),
            "no rendezvous server answered at " + ToText(dead) + ": connect: Connection refused");
}

TEST(TcpStore, LetsNobodyInWithoutTheToken) {
  auto server = StartServer();
  auto client = TcpStoreClient::Connect({server->address()}, "wrong", Late());
  EXPECT_EQ(client.status().code(), StatusCode::kAuthentication);
  EXPECT_NE(client.status().message().find("both sides need the same token"), std::string::npos);
  EXPECT_EQ(TcpStoreServer::Start({"127.0.0.1", 0}, "").status().code(),
            StatusCode::kInvalidArgument);
}

TEST(TcpStore, StopsWaitingForAServerThatNeverAnswers) {
  auto silent = ListenTcp({"127.0.0.1", 0});
  ASSERT_TRUE(silent.ok());
  const auto address = LocalAddress(silent.value().get()).value();
  auto client = TcpStoreClient::Connect({address}, "secret", Soon());
  EXPECT_EQ(client.status().code(), StatusCode::kTimeout);
}

TEST(TcpStore, SaysThatAPortIsTaken) {
  auto server = StartServer();
  auto second = TcpStoreServer::Start(server->address(), "secret");
  EXPECT_EQ(second.status().message(), "rendezvous server: listen on " + ToText(server->address()) +
                                           ": Address already in use");
}

TEST(TcpStore, LeavesNoThreadAndNoDescriptor) {
  const Holdings before = HoldingsBefore();
  {
    Parties parties = TwoClients();
    ASSERT_TRUE(parties.writer->Set("key", "1", Late()).ok());
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&parties] {
        EXPECT_TRUE(parties.reader->Get("key", Late()).ok());
        EXPECT_FALSE(parties.reader->Get("never", Soon()).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const Holdings after = HoldingsAfter(before);
  EXPECT_TRUE(before == after) << ToText(before) << " became " << ToText(after);
}

}  // namespace
}  // namespace sparkhvd
