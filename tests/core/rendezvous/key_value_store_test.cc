// The contract that every KeyValueStore must meet.
#include "rendezvous/key_value_store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/deadlines.h"
#include "base/leak_check.h"
#include "base/thorough.h"
#include "rendezvous/blocking_dial.h"
#include "rendezvous/handshake.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/socket.h"
#include "rendezvous/store_frames.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"

namespace sparkhvd {
namespace {

// A store from the view of two parties.
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

std::unique_ptr<TcpStoreServer> StartServer(bool encrypt = false) {
  auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret", {}, encrypt);
  EXPECT_TRUE(server.ok()) << server.status().message();
  return std::move(server).value();
}

std::unique_ptr<TcpStoreClient> ConnectTo(const TcpStoreServer& server) {
  auto client = TcpStoreClient::Connect({server.address()}, "secret", Late());
  EXPECT_TRUE(client.ok()) << client.status().message();
  return std::move(client).value();
}

Parties TwoClientsOf(std::unique_ptr<TcpStoreServer> server) {
  Parties parties;
  parties.server = std::move(server);
  for (int i = 0; i < 2; ++i) parties.owned.push_back(ConnectTo(*parties.server));
  parties.writer = parties.owned[0].get();
  parties.reader = parties.owned[1].get();
  return parties;
}

Parties TwoClients() { return TwoClientsOf(StartServer()); }
Parties Encrypted() { return TwoClientsOf(StartServer(true)); }

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

TEST_P(KeyValueStoreContract, ReturnsValuesThatWereSet) {
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

TEST_P(KeyValueStoreContract, NamesAMissingKey) {
  Parties parties = GetParam().make();
  const auto value = parties.reader->Get("lonely", Soon());
  EXPECT_EQ(value.status().code(), StatusCode::kTimeout);
  EXPECT_EQ(value.status().message(), "key 'lonely' was not set before the deadline");
  ASSERT_TRUE(parties.writer->Set("lonely", "at last", Late()).ok());
  EXPECT_EQ(parties.reader->Get("lonely", Late()).value(), "at last");
}

TEST_P(KeyValueStoreContract, WaitsUntilTheKeyIsSet) {
  Parties parties = GetParam().make();
  std::vector<std::future<std::string>> waiters;
  for (int i = 0; i < 6; ++i) {
    waiters.push_back(std::async(std::launch::async, [&parties, i] {
      auto value = parties.reader->Get("later/" + std::to_string(i % 3), Late());
      return value.ok() ? value.value() : value.status().message();
    }));
  }
  // A waiting thread does not block another one, even on the same client.
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

TEST_P(KeyValueStoreContract, ReturnsAllValuesOfAPrefixInOrder) {
  Parties parties = GetParam().make();
  const std::vector<std::string> values = {"zero", "", std::string("a\0b", 3), "three"};
  auto all = std::async(std::launch::async,
                        [&parties] { return parties.reader->GetAll("all/", {0, 4}, Late()); });
  for (size_t i = values.size(); i-- > 0;) {
    EXPECT_EQ(parties.reader->GetAll("all/", {0, 4}, Soon()).status().code(), StatusCode::kTimeout);
    ASSERT_TRUE(parties.writer->Set("all/" + std::to_string(i), values[i], Late()).ok());
  }
  const auto answer = all.get();
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(answer.value(), values);
  EXPECT_EQ(parties.reader->GetAll("all/", {0, 2}, Late()).value(),
            std::vector<std::string>(values.begin(), values.begin() + 2));
  EXPECT_TRUE(parties.reader->GetAll("none/", {0, 0}, Late()).value().empty());
}

TEST_P(KeyValueStoreContract, ReturnsTheValuesOfARangeAndTheNumbersThatAreMissing) {
  Parties parties = GetParam().make();
  EXPECT_EQ(parties.reader->Missing("some/", {0, 3}, Late()).value(),
            (std::vector<uint32_t>{0, 1, 2}));
  for (const char* number : {"2", "3", "5", "70000"}) {
    ASSERT_TRUE(parties.writer->Set(std::string("some/") + number, number, Late()).ok());
  }
  EXPECT_EQ(parties.reader->Missing("some/", {1, 8}, Late()).value(),
            (std::vector<uint32_t>{1, 4, 6, 7}));
  EXPECT_TRUE(parties.reader->Missing("some/", {2, 4}, Late()).value().empty());
  EXPECT_TRUE(parties.reader->Missing("some/", {0, 0}, Late()).value().empty());
  EXPECT_EQ(parties.reader->GetAll("some/", {2, 4}, Late()).value(),
            (std::vector<std::string>{"2", "3"}));
  // More numbers than a server looks up at once.
  const auto many = parties.reader->Missing("some/", {0, 70'002}, Late());
  ASSERT_TRUE(many.ok()) << many.status().message();
  EXPECT_EQ(many.value().size(), 70'002u - 4);
  EXPECT_EQ(many.value().back(), 70'001u);
}

TEST_P(KeyValueStoreContract, ReturnsMoreValuesThanOneAnswerHolds) {
  if (!Thorough() || (kSanitized && std::string(GetParam().name) != "TwoClients")) {
    GTEST_SKIP() << "the same large values by the same code";
  }
  Parties parties = GetParam().make();
  std::vector<std::string> values;
  for (const char fill : {'a', 'b'}) values.emplace_back(kMaxValueBytes - 2, fill);
  values.insert(values.begin() + 1, "small");
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(parties.writer->Set("large/" + std::to_string(i), values[i], Late()).ok());
  }
  const auto answer =
      parties.reader->GetAll("large/", {0, static_cast<uint32_t>(values.size())}, Late());
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_TRUE(answer.value() == values);
}

INSTANTIATE_TEST_SUITE_P(
    Stores, KeyValueStoreContract,
    testing::Values(Entry{"InProcess", InProcess}, Entry{"TwoClients", TwoClients},
                    Entry{"Encrypted", Encrypted}, Entry{"OneClient", OneClient},
                    Entry{"ServerWrites", ServerWrites}, Entry{"ServerReads", ServerReads}),
    [](const auto& entry) { return entry.param.name; });

TEST(InProcessStore, ErasesTheKeysOfAPrefixAndNoOthers) {
  InProcessStore store;
  for (const char* key :
       {"a", "report", "report/", "report/1/0", "report/1/1", "report/10/0", "s"}) {
    ASSERT_TRUE(store.Set(key, key, Late()).ok());
  }
  EXPECT_EQ(store.Erase("none"), 0u);
  EXPECT_EQ(store.Erase("report/1/"), 2u);
  EXPECT_EQ(store.Find("report/1/0"), std::nullopt);
  EXPECT_EQ(store.Find("report/10/0"), "report/10/0");
  ASSERT_TRUE(store.Set("report/1/0", "again", Late()).ok());
  EXPECT_EQ(store.Get("report/1/0", Late()).value(), "again");
  EXPECT_EQ(store.Erase(""), 6u) << "all remaining keys";
  EXPECT_EQ(store.Erase(""), 0u);
}

TEST(TcpStore, AnErasedKeyIsMissingForClientsUntilItIsSetAgain) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  ASSERT_TRUE(client->Set("generation/1/lost", "a", Late()).ok());
  ASSERT_TRUE(client->Set("generation/2/lost", "b", Late()).ok());
  EXPECT_EQ(server->Erase("generation/1/"), 1u);
  EXPECT_EQ(client->Get("generation/1/lost", Soon()).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(client->Get("generation/2/lost", Late()).value(), "b");
  ASSERT_TRUE(server->Set("generation/1/lost", "c", Late()).ok());
  EXPECT_EQ(client->Get("generation/1/lost", Late()).value(), "c") << "the pending request";
}

TEST(TcpStore, WakesItsWaitersWhenTheServerCloses) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto waiter = std::async(std::launch::async, [&] { return client->Get("never", Late()); });
  // The connection exists once the server has answered on a connection that was dialed later.
  ASSERT_TRUE(client->Set("other", "1", Late()).ok());
  const std::string address = ToText(server->address());
  server->Close();
  const Status status = waiter.get().status();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(
      status.message().find("get key 'never': lost the rendezvous server at " + address + ": "),
      std::string::npos)
      << status.message();
  EXPECT_EQ(client->Set("more", "1", Late()).code(), StatusCode::kPeerLost);
}

TEST(TcpStore, AnswersEqualRequestsOfAllClientsThatStillWait) {
  auto server = StartServer();
  std::vector<std::unique_ptr<TcpStoreClient>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(ConnectTo(*server));
  for (const auto& client : clients) {  // the server keeps the requests
    EXPECT_EQ(client->GetAll("all/", {0, 2}, Deadline::AfterSeconds(0)).status().code(),
              StatusCode::kTimeout);
    EXPECT_EQ(client->Get("one", Deadline::AfterSeconds(0)).status().code(), StatusCode::kTimeout);
  }
  clients.erase(clients.begin());
  for (const char* key : {"all/1", "one", "all/0"}) {
    ASSERT_TRUE(server->Set(key, key, Late()).ok());
  }
  for (const auto& client : clients) {
    const auto all = client->GetAll("all/", {0, 2}, Late());
    ASSERT_TRUE(all.ok()) << all.status().message();
    EXPECT_EQ(all.value(), (std::vector<std::string>{"all/0", "all/1"}));
    EXPECT_EQ(client->Get("one", Late()).value(), "one");
  }
}

// Ranks poll for months, for a loss, a question or a failure.
TEST(TcpStore, ReceivesOneRequestHoweverOftenItsClientPollsForAKey) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  for (int time = 0; time < 20; ++time) {
    EXPECT_FALSE(client->Get("loss", Deadline::AfterSeconds(0)).ok());
    EXPECT_FALSE(client->GetAll("done/", {0, 1000}, Deadline::AfterSeconds(0)).ok());
  }
  ASSERT_TRUE(server->Set("loss", "rank 1", Late()).ok());
  EXPECT_EQ(client->Get("loss", Late()).value(), "rank 1");
  for (int number = 0; number < 1000; ++number) {
    ASSERT_TRUE(server->Set("done/" + std::to_string(number), "", Late()).ok());
  }
  EXPECT_EQ(client->GetAll("done/", {0, 1000}, Late()).value().size(), 1000u);
  EXPECT_TRUE(client->Missing("done/", {0, 1000}, Late()).value().empty());
  EXPECT_EQ(server->requests(), 3u);
}

TEST(TcpStore, AClientHasOneConnectionHoweverManyRequestsWait) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  ASSERT_TRUE(client->Set("key", "1", Late()).ok());  // so the server has admitted the client
  const Holdings before;
  auto will = client->LeaveWill("lost", "", Late());
  ASSERT_TRUE(will.ok()) << will.status().message();
  std::vector<std::future<std::string>> waiters;
  for (int i = 0; i < 4; ++i) {
    const std::string key = "later/" + std::to_string(i);
    EXPECT_FALSE(client->Get("never/" + std::to_string(i), Deadline::AfterSeconds(0)).ok());
    waiters.push_back(
        std::async(std::launch::async, [&, key] { return client->Get(key, Late()).value(); }));
  }
  EXPECT_EQ(client->Get("key", Late()).value(), "1");
  EXPECT_EQ(Holdings().descriptors, before.descriptors);
  for (int i = 3; i >= 0; --i) {
    ASSERT_TRUE(client->Set("later/" + std::to_string(i), std::to_string(i), Late()).ok());
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(waiters[static_cast<size_t>(i)].get(), std::to_string(i));
  will.value()->Withdraw();
}

// The server reads nothing while it sends, so both would wait for the other to read.
TEST(TcpStore, AClientThatSendsALongValueReceivesThoseThatItNoLongerWaitsFor) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  const std::string value(kMaxValueBytes / 2, 'v');
  for (const char* key : {"a", "b"}) {
    EXPECT_FALSE(client->Get(key, Deadline::AfterSeconds(0)).ok());
  }
  for (const char* key : {"a", "b"}) ASSERT_TRUE(server->Set(key, value, Late()).ok());
  ASSERT_TRUE(client->Set("c", value, Late()).ok());
  for (const char* key : {"a", "b", "c"}) EXPECT_TRUE(client->Get(key, Late()).value() == value);
}

TEST(TcpStore, AnEarlierRequestMayTimeOutWhileALaterOneIsAnswered) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto waiter = std::async(std::launch::async, [&] { return client->Get("later", Late()); });
  EXPECT_EQ(client->Get("never", Soon()).status().code(), StatusCode::kTimeout);
  ASSERT_TRUE(client->Set("later", "1", Late()).ok());
  EXPECT_EQ(waiter.get().value(), "1");
}

TEST(TcpStore, ForgetsTheRequestsOfAKeyThatAClientNoLongerAsksFor) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto waiter = std::async(std::launch::async, [&] { return client->Get("key", Late()); });
  for (int time = 0; time < 100; ++time) {
    const std::string key = "key/" + std::to_string(time);
    EXPECT_FALSE(client->Get(key, Deadline::AfterSeconds(0)).ok());
    if (time % 2 == 0) client->StopAsking(key);
  }
  EXPECT_FALSE(client->Get("key", Deadline::AfterSeconds(0)).ok());
  client->StopAsking("key");
  ASSERT_TRUE(server->Set("key", "1", Late()).ok());
  EXPECT_EQ(waiter.get().value(), "1") << "this call still waits";
  ASSERT_TRUE(server->Set("key/7", "2", Late()).ok());
  EXPECT_EQ(client->Get("key/7", Late()).value(), "2");
}

// Ends this process's connections to the server.
void Disconnect(const TcpStoreServer& server) {
  for (int fd = 0; fd < 1024; ++fd) {
    const auto peer = PeerAddress(fd);
    if (peer.ok() && peer.value().port == server.address().port) ::shutdown(fd, SHUT_RDWR);
  }
}

TEST(TcpStore, AClientDialsAgainAfterItsConnectionHasEnded) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  auto will = client->LeaveWill("will", "carried out", Late());
  ASSERT_TRUE(will.ok()) << will.status().message();
  EXPECT_FALSE(client->Get("key", Deadline::AfterSeconds(0)).ok());
  Disconnect(*server);
  EXPECT_EQ(client->Get("key", Late()).status().code(), StatusCode::kPeerLost);
  ASSERT_TRUE(client->Set("key", "1", Late()).ok());
  EXPECT_EQ(client->Get("key", Late()).value(), "1");
  EXPECT_EQ(client->Get("will", Late()).value(), "carried out");
}

TEST(TcpStore, AForkedChildDropsItsCopyOfAClientWhileThreadsOfTheParentWait) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  std::vector<std::future<Status>> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.push_back(std::async(std::launch::async,
                                 [&client] { return client->Get("later", Late()).status(); }));
  }
  const Deadline deadline = Late();
  while (server->requests() < waiters.size() && !deadline.Expired()) std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    client.reset();
    ::_exit(0);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && !deadline.Expired()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(ended, child) << "the child hangs";
  if (ended == 0) ::kill(child, SIGKILL);
  ASSERT_TRUE(client->Set("later", "1", Late()).ok());
  for (std::future<Status>& waiter : waiters) EXPECT_TRUE(waiter.get().ok());
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

TEST(TcpStore, RefusesLargeKeysAndValues) {
  auto server = StartServer();
  auto client = ConnectTo(*server);
  const std::string key(kMaxKeyBytes + 1, 'k');
  const std::string value(kMaxValueBytes + 1, 'v');
  EXPECT_EQ(client->Set(key, "", Late()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Get(key, Late()).status().code(), StatusCode::kInvalidArgument);
  const Status refused = client->Set("big", value, Late());
  EXPECT_EQ(refused.message(),
            "the value of key 'big' has 16777217 bytes; a rendezvous value has at most 16777216; "
            "pass larger values through the Store");
  EXPECT_EQ(server->Set("big", value, Late()).code(), StatusCode::kInvalidArgument);
  if (!Thorough()) return;
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

TEST(TcpStore, RejectsClientsWithoutTheToken) {
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

// Forwards data between one client and a server, and records it. Flips a bit of the byte at `flip`
// of the server's data.
class Wire {
 public:
  explicit Wire(HostPort server, size_t flip = ~size_t{0}) : flip_(flip) {
    auto listener = ListenTcp({"127.0.0.1", 0});
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    address_ = LocalAddress(listener.value().get()).value();
    thread_ = std::thread([this, server = std::move(server), owned = std::move(listener).value()] {
      Run(server, owned);
    });
  }
  ~Wire() { thread_.join(); }

  const HostPort& address() const { return address_; }
  // Call it after the client has disconnected.
  std::string Seen() {
    thread_.join();
    thread_ = std::thread([] {});
    return seen_;
  }

 private:
  void Run(const HostPort& server, const UniqueFd& listener) {
    ASSERT_TRUE(AwaitEvents(listener.get(), POLLIN, Late()).ok());
    const UniqueFd near(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    auto far = ConnectTcp(server, Late());
    ASSERT_TRUE(far.ok()) << far.status().message();
    std::array<pollfd, 2> ends = {{{near.get(), POLLIN, 0}, {far.value().get(), POLLIN, 0}}};
    std::array<std::byte, 10'000> buffer;
    size_t said = 0;  // bytes sent by the server
    while (::poll(ends.data(), 2, 30'000) > 0) {
      for (size_t from = 0; from < 2; ++from) {
        auto count = ReadSome(ends[from].fd, Bytes(buffer.data(), buffer.size()));
        if (!count.ok()) return;
        if (from == 1 && said <= flip_ && flip_ < said + count.value())
          buffer[flip_ - said] ^= std::byte(1);
        said += from == 1 ? count.value() : 0;
        const ConstBytes moved(buffer.data(), count.value());
        seen_.append(reinterpret_cast<const char*>(moved.data()), moved.size());
        if (!WriteExactly(ends[1 - from].fd, moved, Late()).ok()) return;
      }
    }
  }

  const size_t flip_;
  HostPort address_;
  std::string seen_;
  std::thread thread_;
};

TEST(TcpStore, HidesItsTrafficIfTheServerEncrypts) {
  for (const bool encrypt : {false, true}) {
    auto server = StartServer(encrypt);
    ASSERT_TRUE(server->Set("answer", "what the server knows", Late()).ok());
    Wire wire(server->address());
    {
      auto client = TcpStoreClient::Connect({wire.address()}, "secret", Late());
      ASSERT_TRUE(client.ok()) << client.status().message();
      ASSERT_TRUE(client.value()->Set("a key", "what the client says", Late()).ok());
      EXPECT_EQ(client.value()->Get("answer", Late()).value(), "what the server knows");
    }
    EXPECT_EQ(server->Get("a key", Late()).value(), "what the client says");
    const std::string seen = wire.Seen();
    for (const char* said : {"a key", "what the client says", "what the server knows"}) {
      EXPECT_EQ(seen.find(said) == std::string::npos, encrypt) << said;
    }
  }
}

TEST(TcpStore, RefusesAlteredMessages) {
  auto server = StartServer(true);
  ASSERT_TRUE(server->Set("key", "value", Late()).ok());
  constexpr size_t kHandshake = kWelcomeBytes + kProofBytes;
  for (const size_t flip : {kHandshake, kHandshake + kFrameHeadBytes + 2}) {
    Wire wire(server->address(), flip);
    auto client = TcpStoreClient::Connect({wire.address()}, "secret", Late());
    ASSERT_TRUE(client.ok()) << client.status().message();
    const auto got = client.value()->Get("key", Late());
    EXPECT_EQ(got.status().code(), StatusCode::kAuthentication) << got.status().message();
  }
  for (const size_t terms : {kNonceBytes, kWelcomeBytes - 1}) {
    Wire wire(server->address(), terms);
    auto client = TcpStoreClient::Connect({wire.address()}, "secret", Late());
    EXPECT_EQ(client.status().code(), StatusCode::kAuthentication)
        << "no third party can turn off the encryption";
  }
}

TEST(TcpStore, AClientThatMustEncryptRefusesAServerThatDoesNot) {
  auto plain = StartServer();
  const auto refused = TcpStoreClient::Connect({plain->address()}, "secret", Late(), {}, true);
  EXPECT_EQ(refused.status().code(), StatusCode::kAuthentication);
  EXPECT_NE(refused.status().message().find("does not encrypt"), std::string::npos)
      << refused.status().message();
  auto sealed = StartServer(true);
  const auto taken = TcpStoreClient::Connect({sealed->address()}, "secret", Late(), {}, true);
  EXPECT_TRUE(taken.ok()) << taken.status().message();
}

TEST(TcpStore, ReportsATakenPort) {
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
