// Tests ranks that connect, and ranks that fail to connect.
#include "transport/mesh.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <future>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/failure_note.h"
#include "base/leak_check.h"
#include "rendezvous/strangers.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"
#include "transport/address_record.h"
#include "transport/arena_file.h"
#include "transport/failures.h"
#include "transport/meshes.h"
#include "transport/message_header.h"
#include "transport/transport_subset.h"

namespace sparkhvd {
namespace {

// Sets each member separately: gcc 12 warns that the strings of a braced initializer may be
// destroyed before they are made.
AddressRecord MakeRecord(const std::string& host, uint16_t port, const std::string& unix_name,
                         const std::string& host_key, uint64_t region_bytes) {
  AddressRecord record;
  record.tcp.push_back({host, port});
  record.unix_name = unix_name;
  record.host_key = host_key;
  record.shared_memory = true;
  record.arena_region_bytes = region_bytes;
  return record;
}

// Publishes the address of a rank that listens there and never accepts. Returns its listener;
// without it, the address refuses connections.
UniqueFd ListenAs(KeyValueStore& store, int rank) {
  UniqueFd listener = ListenTcp({"127.0.0.1", 0}).value();
  AddressRecord record;
  record.tcp = {LocalAddress(listener.get()).value()};
  const std::string key = "test/address/" + std::to_string(rank);
  EXPECT_TRUE(store.Set(key, EncodeAddressRecord(record), Late()).ok());
  return listener;
}

AddressRecord RecordOf(KeyValueStore& store, int rank) {
  auto bytes = store.Get("test/address/" + std::to_string(rank), Late());
  EXPECT_TRUE(bytes.ok()) << bytes.status().message();
  return DecodeAddressRecord(bytes.value()).value();
}

TEST(ConnectMesh, RanksWithDifferentSettingsGetAnErrorThatNamesTheSetting) {
  const auto results = TryConnect(3, [](MeshOptions* options) {
    options->common_settings = {{"capacity", "5"}, {"size", options->rank == 2 ? "1" : "7"}};
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), StatusCode::kMismatch);
    const std::string message = result.status().message();
    EXPECT_NE(message.find("ranks disagree about size: rank "), std::string::npos) << message;
    EXPECT_NE(message.find("rank 2 has 1"), std::string::npos) << message;
    EXPECT_NE(message.find(" has 7"), std::string::npos) << message;
  }
}

TEST(ConnectMesh, RanksWithOtherNamesOfSettingsGetAnErrorThatNamesTheSetting) {
  const auto results = TryConnect(2, [](MeshOptions* options) {
    options->common_settings = {{"capacity", "5"}};
    if (options->rank == 1) options->common_settings["size"] = "7";
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), StatusCode::kMismatch);
    const std::string message = result.status().message();
    EXPECT_NE(message.find("ranks disagree about size: "), std::string::npos) << message;
    EXPECT_NE(message.find("rank 0 has unknown"), std::string::npos) << message;
    EXPECT_NE(message.find("rank 1 has 7"), std::string::npos) << message;
  }
}

TEST(ConnectMesh, LinksHaveTheConfiguredCostsAndSubsetsShareTheLine) {
  for (const bool encrypt : {false, true}) {
    std::vector<Mesh> meshes = Connect(2, [&](MeshOptions* options) {
      options->link_costs = LinkCosts{1e-6, 2e-9};
      options->encrypt = encrypt;
      if (encrypt) options->host_key.clear();
    });
    EXPECT_EQ(meshes[1].transport->costs().per_message, 1e-6);
    EXPECT_EQ(meshes[1].transport->costs().per_byte, 2e-9);
    const TransportSubset lane(*meshes[1].transport, {0, 1}, 8);
    EXPECT_EQ(lane.costs().per_message, 1e-6);
    EXPECT_EQ(lane.costs().per_byte, 16e-9);
  }
}

TEST(ConnectMesh, NeedsNoSocketForOneRank) {
  InProcessStore store;
  store.Close(Status(StatusCode::kInternal, "the store was used"));
  MeshOptions options;
  auto mesh = ConnectMesh(options, store, Soon());
  ASSERT_TRUE(mesh.ok()) << mesh.status().message();
  EXPECT_EQ(mesh.value().transport->size(), 1);
  EXPECT_EQ(mesh.value().arena, nullptr);
  EXPECT_TRUE(mesh.value().transport->Wait({}, Soon()).ok());
}

TEST(ConnectMesh, SharesMemoryAmongTheRanksOfEachHost) {
  const auto meshes = Connect(
      5, [](MeshOptions* options) { options->host_key = options->rank % 2 == 0 ? "even" : "odd"; });
  for (size_t rank = 0; rank < 5; ++rank) {
    ASSERT_NE(meshes[rank].arena, nullptr);
    const auto expected = rank % 2 == 0 ? std::vector<int>{0, 2, 4} : std::vector<int>{1, 3};
    EXPECT_EQ(meshes[rank].arena->ranks(), expected);
  }
}

TEST(ConnectMesh, SharesNoMemoryWhenOneMemberCannot) {
  const auto check = [](const std::function<void(MeshOptions*)>& change) {
    for (const Mesh& mesh : Connect(3, change)) {
      EXPECT_EQ(mesh.arena, nullptr);
      EXPECT_NE(mesh.transport, nullptr);
    }
  };
  check([](MeshOptions* options) { options->shared_memory = options->rank != 1; });
  check([](MeshOptions* options) { options->arena_region_bytes += options->rank == 2 ? 1 : 0; });
  check([](MeshOptions* options) { options->host_key.clear(); });
  // 2 TiB, which the creator rejects before it reserves a byte.
  check([](MeshOptions* options) { options->arena_region_bytes = size_t{1} << 39; });
}

TEST(ConnectMesh, NeighborsNeedNoDescriptor) {
  const std::vector<Mesh> all = Connect(4);
  const Holdings before = HoldingsBefore();
  for (int round = 0; round < 5; ++round) {
    const std::vector<Mesh> some = Connect(3, [&](MeshOptions* options) {
      options->neighbors =
          all[static_cast<size_t>(options->rank + 1)].watches.lock()->Of({1, 2, 3});
    });
    EXPECT_TRUE(Holdings() == before) << ToText(Holdings());
    for (const Mesh& mesh : some) {
      EXPECT_EQ(mesh.arena->ranks(), (std::vector<int>{0, 1, 2}));
      EXPECT_EQ(mesh.memory_groups, (std::vector<std::vector<int>>{{0, 1, 2}}));
      EXPECT_EQ(mesh.host_ranks, (std::vector<int>{0, 1, 2}));
    }
  }
}

TEST(ConnectMesh, NeighborsUseSocketsIfTheirMemoryCannotBeShared) {
  const std::vector<Mesh> all = Connect(3);
  // 2 TiB, which the creator rejects before it reserves a byte.
  const std::vector<Mesh> meshes = ConnectNeighbors(
      all, [](MeshOptions* options) { options->arena_region_bytes = size_t{1} << 39; });
  for (const Mesh& mesh : meshes) {
    EXPECT_EQ(mesh.arena, nullptr);
    EXPECT_EQ(mesh.transport->size(), 3);
    EXPECT_TRUE(mesh.watches.expired());
  }
}

TEST(ConnectMesh, NeighborsStopWaitingForMemoryWhenItsCreatorHasFailed) {
  const std::vector<Mesh> all = Connect(2);
  InProcessStore store;
  MeshOptions options = OptionsOf(1, 2);
  options.neighbors = all[1].watches.lock();
  AddressRecord record;
  record.host_key = options.host_key;
  record.shared_memory = true;
  record.arena_region_bytes = options.arena_region_bytes;
  ASSERT_TRUE(store.Set("test/address/0", EncodeAddressRecord(record), Late()).ok());
  const Status missing = ConnectMesh(options, store, Soon()).status();
  EXPECT_EQ(missing.code(), StatusCode::kTimeout);
  EXPECT_NE(missing.message().find("rank 1 waits for the arena of rank 0: "), std::string::npos)
      << missing.message();

  InProcessStore other;
  const Status failure(StatusCode::kAborted, "rank 0: interrupted");
  ASSERT_TRUE(other.Set("test/address/0", EncodeAddressRecord(record), Late()).ok());
  ASSERT_TRUE(other.Set("test/connect-failure", EncodeFailure(failure), Late()).ok());
  EXPECT_EQ(ConnectMesh(options, other, Late()).status().message(), "rank 0: interrupted");
}

TEST(ConnectMesh, RefusesInvalidOptions) {
  InProcessStore store;
  const auto message = [&store](const std::function<void(MeshOptions*)>& change) {
    MeshOptions options = OptionsOf(0, 2);
    change(&options);
    return ConnectMesh(options, store, Soon()).status().message();
  };
  EXPECT_EQ(message([](MeshOptions* options) { options->rank = 2; }),
            "connect the ranks: rank 2 is out of range for a job of size 2");
  EXPECT_EQ(message([](MeshOptions* options) { options->token.clear(); }),
            "connect the ranks: ranks can only be connected with the job's token");
  EXPECT_EQ(message([](MeshOptions* options) { options->arena_region_bytes = size_t{1} << 55; }),
            "connect the ranks: an arena region must have 1 to 1099511627776 bytes, not "
            "36028797018963968");
  EXPECT_EQ(message([](MeshOptions* options) { options->bind_hosts = {"127.0.0.1", "0.0.0.0"}; }),
            "connect the ranks: bind_host '0.0.0.0' is not an address that peers can dial; use the "
            "address of one interface");
}

TEST(ConnectMesh, NamesTheRankThatNeverPublishesItsAddress) {
  InProcessStore store;
  const Status status = ConnectMesh(OptionsOf(0, 2), store, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "rank 0 waits for the address of rank 1: key 'test/address/1' was not set before "
            "the deadline");
}

void AllowDescriptors(rlim_t count) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min(limit.rlim_max, std::max(limit.rlim_cur, count));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// Counts the requests for single keys.
class CountingStore final : public KeyValueStore {
 public:
  Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    return values_.Set(key, value, deadline);
  }
  Result<std::string> Get(const std::string& key, Deadline deadline) override {
    // Ranks look for a failure whenever they wait.
    if (key != "test/connect-failure") ++single_gets;
    return values_.Get(key, deadline);
  }
  Result<std::vector<std::string>> GetAll(const std::string& prefix, NumberRange numbers,
                                          Deadline deadline) override {
    return values_.GetAll(prefix, numbers, deadline);
  }

  std::atomic<int> single_gets{0};

 private:
  InProcessStore values_;
};

TEST(ConnectMesh, AsksTheStoreForAllRanksAtOnce) {
  CountingStore store;
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < 5; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&store, rank] {
      return ConnectMesh(OptionsOf(rank, 5), store, Late()).status();
    }));
  }
  for (auto& rank : ranks) EXPECT_EQ(rank.get().message(), "");
  EXPECT_EQ(store.single_gets, 0);
}

// Counts what one rank sends to a store on another host and receives from it. Like TcpStoreClient,
// it sends a request once, which stays at the store while the rank waits for the answer.
class BudgetedStore final : public KeyValueStore {
 public:
  explicit BudgetedStore(InProcessStore& values) : values_(values) {}

  Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    Send("set " + key + " " + value);
    return values_.Set(key, value, deadline);
  }
  Result<std::string> Get(const std::string& key, Deadline deadline) override {
    Send("get " + key);
    auto value = values_.Get(key, deadline);
    if (value.ok()) bytes += value.value().size();
    return value;
  }
  Result<std::vector<std::string>> GetAll(const std::string& prefix, NumberRange numbers,
                                          Deadline deadline) override {
    Send("get all " + prefix);
    auto values = values_.GetAll(prefix, numbers, deadline);
    if (!values.ok()) return values;
    for (const std::string& value : values.value()) bytes += value.size();
    return values;
  }
  Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                          Deadline deadline) override {
    Send("will " + key + " " + value);
    return values_.LeaveWill(key, value, deadline);
  }

  size_t requests() const { return sent_.size(); }
  size_t bytes = 0;

 private:
  void Send(const std::string& request) {
    if (sent_.insert(request).second) bytes += request.size();
  }

  InProcessStore& values_;
  std::set<std::string> sent_;
};

class StartBudget : public testing::TestWithParam<int> {};

// Four ranks per host.
TEST_P(StartBudget, IsAConstantNumberOfRequestsAndOfLinks) {
  const int size = GetParam();
  const auto ranks = static_cast<size_t>(size);
  AllowDescriptors(2048);
  InProcessStore values;
  std::vector<BudgetedStore> stores(ranks, BudgetedStore(values));
  std::vector<Mesh> meshes(ranks);
  const Holdings before = HoldingsBefore();
  ForEachRank(size, [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    MeshOptions options = OptionsOf(rank, size);
    options.host_key = "host " + std::to_string(rank / 4);
    auto mesh = ConnectMesh(options, stores[index], Late());
    ASSERT_TRUE(mesh.ok()) << mesh.status().message();
    meshes[index] = std::move(mesh).value();
  });
  for (const BudgetedStore& store : stores) {
    // The will, the address, the addresses, the vote, the votes, and whether a rank has failed.
    EXPECT_LE(store.requests(), 6u);
    EXPECT_LE(store.bytes, 1000 + 200 * ranks);
  }
  const int links = size * 2;    // a ring
  const int watches = size * 3;  // of the other ranks of the host
  const int wakes = size;
  const int listeners = size * 2;  // TCP and Unix
  EXPECT_EQ(Holdings().descriptors - before.descriptors, links + watches + wakes + listeners);
}

INSTANTIATE_TEST_SUITE_P(Ranks, StartBudget, testing::Values(4, 8, 16, 32));

TEST(ConnectMesh, NamesTheRankThatNeverDials) {
  InProcessStore store;
  ASSERT_TRUE(store.Set("test/address/1", EncodeAddressRecord({}), Late()).ok());
  const Status status = ConnectMesh(OptionsOf(0, 2), store, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(), "rank 0 at " + ToText(RecordOf(store, 0).tcp[0]) +
                                  " was not reached by rank 1 before the deadline");
}

TEST(ConnectMesh, NamesTheRankThatCannotBeReachedAndItsAddress) {
  InProcessStore store;
  ListenAs(store, 0).Reset();
  const Status status = ConnectMesh(OptionsOf(1, 2), store, Late()).status();
  EXPECT_EQ(status.message(), "rank 1 at " + ToText(RecordOf(store, 1).tcp[0]) +
                                  " could not reach rank 0: " + ToText(RecordOf(store, 0).tcp[0]) +
                                  ": connect: Connection refused");
}

TEST(ConnectMesh, StopsWaitingForASilentRank) {
  InProcessStore store;
  const UniqueFd silent = ListenAs(store, 0);
  const Status status = ConnectMesh(OptionsOf(1, 2), store, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find(" could not reach rank 0: "), std::string::npos);
}

TEST(ConnectMesh, ReportsTheRanksThatCannotBeReachedOnceAllRanksKnowTheirs) {
  InProcessStore store;
  // Rank 0 answers no attempt to connect, because its queue is full; rank 1 refuses them at once;
  // rank 2 accepts them, but its process is silent.
  const UniqueFd full = ListenAs(store, 0);
  ASSERT_EQ(::listen(full.get(), 0), 0);
  ListenAs(store, 1).Reset();
  const UniqueFd silent = ListenAs(store, 2);
  const auto queued = BeginConnectTcp(RecordOf(store, 0).tcp[0]);
  ASSERT_TRUE(queued.ok());
  MeshOptions options = OptionsOf(3, 4);
  options.answer_limit = std::chrono::milliseconds(300);
  const auto begin = Deadline::Clock::now();
  const Status status = ConnectMesh(options, store, Late()).status();
  EXPECT_GE(Deadline::Clock::now() - begin, *options.answer_limit);
  EXPECT_EQ(status.message(), "rank 3 at " + ToText(RecordOf(store, 3).tcp[0]) +
                                  " could not reach rank 1: " + ToText(RecordOf(store, 1).tcp[0]) +
                                  ": connect: Connection refused");
  EXPECT_EQ(store.Get("test/unreachable/3", Late()).value(), "1,0");
}

TEST(ConnectMesh, ReportsMoreRanksThatCannotBeReachedThanItDialsAtOnce) {
  InProcessStore store;
  const UniqueFd full = ListenAs(store, 0);
  ASSERT_EQ(::listen(full.get(), 0), 0);
  const AddressRecord record = RecordOf(store, 0);
  const auto queued = BeginConnectTcp(record.tcp[0]);
  ASSERT_TRUE(queued.ok());
  std::string all;
  for (int rank = 19; rank >= 0; --rank) {
    const std::string key = "test/address/" + std::to_string(rank);
    ASSERT_TRUE(store.Set(key, EncodeAddressRecord(record), Late()).ok());
    all += (all.empty() ? "" : ",") + std::to_string(rank);
  }
  MeshOptions options = OptionsOf(20, 21);
  options.answer_limit = std::chrono::seconds(1);
  EXPECT_FALSE(ConnectMesh(options, store, Late()).ok());
  EXPECT_EQ(store.Get("test/unreachable/20", Late()).value(), all);
}

TEST(ConnectMesh, DoesNotReportARankThatRefusesBecauseTheRanksHaveJustFailed) {
  InProcessStore store;
  ListenAs(store, 0).Reset();
  const Status lost = PeerLost(2, "its process ended");
  ASSERT_TRUE(store.Set("test/connect-failure", EncodeFailure(lost), Late()).ok());
  ASSERT_TRUE(store.Set("test/address/2", EncodeAddressRecord({}), Late()).ok());
  MeshOptions options = OptionsOf(1, 3);
  options.answer_limit = std::chrono::seconds(60);
  EXPECT_EQ(ConnectMesh(options, store, Late()).status().message(), lost.message());
  EXPECT_FALSE(store.Get("test/unreachable/1", Deadline::AfterSeconds(0)).ok());
}

TEST(ConnectMesh, DoesNotReportARankThatAcceptsButIsSilent) {
  InProcessStore store;
  const UniqueFd silent = ListenAs(store, 0);
  MeshOptions options = OptionsOf(1, 2);
  options.answer_limit = std::chrono::milliseconds(1);
  const Status status = ConnectMesh(options, store, Soon()).status();
  EXPECT_NE(status.message().find(": connected, but no answer"), std::string::npos)
      << status.message();
  EXPECT_FALSE(store.Get("test/unreachable/1", Deadline::AfterSeconds(0)).ok());
}

TEST(ConnectMesh, DialsSeveralRanksAtOnceAndAcceptsMeanwhile) {
  InProcessStore store;
  std::vector<UniqueFd> silent;  // the listeners of ranks 0 and 1, which never accept
  for (int rank = 0; rank < 2; ++rank) {
    silent.push_back(ListenAs(store, rank));
  }
  ASSERT_TRUE(store.Set("test/address/3", EncodeAddressRecord({}), Late()).ok());
  std::atomic<bool> enough{false};
  auto two = std::async(std::launch::async, [&store, &enough] {
    MeshOptions options = OptionsOf(2, 4);
    options.answer_limit = std::chrono::seconds(60);  // so that it dials both
    options.interrupted = [&enough] {
      return enough ? Status(StatusCode::kShutDown, "enough") : Status();
    };
    return ConnectMesh(options, store, Late()).status();
  });
  const Deadline deadline = Deadline::AfterSeconds(20);
  for (const UniqueFd& listener : silent) {
    EXPECT_TRUE(AwaitEvents(listener.get(), POLLIN, deadline).ok()) << "rank 2 dials";
  }
  auto three = ConnectTcp(RecordOf(store, 2).tcp[0], deadline);
  ASSERT_TRUE(three.ok());
  const Status accepted = DialHandshake(three.value().get(), "secret", "mesh/test/2",
                                        (uint64_t{1} << 32) | 3, deadline);
  EXPECT_TRUE(accepted.ok()) << accepted.message();
  enough = true;
  EXPECT_EQ(two.get().message(), "rank 2: enough");
}

TEST(ConnectMesh, RefusesARankWithAnotherToken) {
  const auto results = TryConnect(
      2,
      [](MeshOptions* options) {
        if (options->rank == 1) options->token = "wrong";
      },
      Deadline::AfterSeconds(0.5));
  EXPECT_EQ(results[1].status().code(), StatusCode::kAuthentication);
  EXPECT_EQ(results[0].status().code(), StatusCode::kAuthentication)
      << "all ranks report the reason of the failed rank";
}

TEST(ConnectMesh, ConnectsDespiteForeignConnections) {
  for (const bool unix_socket : {false, true}) {
    InProcessStore store;
    auto zero = std::async(std::launch::async,
                           [&store] { return ConnectMesh(OptionsOf(0, 2), store, Late()); });
    // Rank 0 accepts once it knows the address of rank 1, which is published later.
    const AddressRecord record = RecordOf(store, 0);
    const AddressRecord nobody = MakeRecord("127.0.0.1", 1, "x", "this host", 10'000);
    ASSERT_TRUE(store.Set("test/address/1", EncodeAddressRecord(nobody), Late()).ok());
    const Dialer dial = [&] {
      return unix_socket ? ConnectUnix(record.unix_name, Late())
                         : ConnectTcp(record.tcp[0], Late());
    };
    const auto half_open = dial();
    SendGarbage(dial);
    SendEndlessly(dial);
    UseWrongToken(dial, "mesh/test/0");
    Replay(dial, "secret", "mesh/test/0");
    auto fd = dial();
    ASSERT_TRUE(fd.ok());
    // A dialer that knows the token claims the link of rank 1.
    EXPECT_TRUE(
        DialHandshake(fd.value().get(), "secret", "mesh/test/0", (uint64_t{1} << 32) | 1, Late())
            .ok());
    ASSERT_TRUE(store.Set("test/arena/1", "no", Late()).ok());
    auto mesh = zero.get();
    EXPECT_TRUE(mesh.ok()) << mesh.status().message();
  }
}

// Tests in which ranks are processes, one of which is killed.

struct Child {
  pid_t pid;
  UniqueFd orders;   // written by the parent: starts the child's work
  UniqueFd reports;  // read by the parent: the child's reports
};

void Say(int fd, const std::string& text) {
  const std::string line = text + "\n";
  (void)!::write(fd, line.data(), line.size());
}

std::string ReadLine(int fd, Deadline deadline) {
  std::string line;
  char letter = 0;
  while (AwaitEvents(fd, POLLIN, deadline).ok() && ::read(fd, &letter, 1) == 1 && letter != '\n') {
    line += letter;
  }
  return line;
}

using Body = void (*)(Mesh& mesh, int orders, int reports);

enum class Through { kLinks, kMemory };

// Runs in the child: connects, reports that, and runs `body`. Through memory, `body` runs in a
// second mesh of the same ranks.
void RunRank(int rank, int size, int orders, int reports, Body body, Through through) {
  const Deadline deadline = Late();
  const HostPort server{"127.0.0.1", static_cast<uint16_t>(std::stoi(ReadLine(orders, deadline)))};
  auto client = TcpStoreClient::Connect({server}, "secret", deadline);
  if (!client.ok()) return Say(reports, client.status().message());
  auto mesh = ConnectMesh(OptionsOf(rank, size), *client.value(), deadline);
  if (!mesh.ok()) return Say(reports, mesh.status().message());
  const std::shared_ptr<const MemberWatches> neighbors = mesh.value().watches.lock();
  if (through == Through::kMemory) {
    MeshOptions options = OptionsOf(rank, size);
    options.scope = "neighbors";
    options.neighbors = neighbors;
    mesh = ConnectMesh(options, *client.value(), deadline);
    if (!mesh.ok()) return Say(reports, mesh.status().message());
  }
  Say(reports, mesh.value().arena == nullptr ? "without arena" : "connected");
  body(mesh.value(), orders, reports);
}

// Forks before this process starts any thread.
std::vector<Child> ForkRanks(int size, Body body, Through through = Through::kLinks) {
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) {
    std::array<int, 2> orders;
    std::array<int, 2> reports;
    EXPECT_EQ(::pipe2(orders.data(), O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(reports.data(), O_CLOEXEC), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(orders[1]);
      ::close(reports[0]);
      RunRank(rank, size, orders[0], reports[1], body, through);
      ::_exit(0);
    }
    ::close(orders[0]);
    ::close(reports[1]);
    children.push_back({pid, UniqueFd(orders[1]), UniqueFd(reports[0])});
  }
  return children;
}

// Connects the children, kills the last one once all are connected, and returns the reports of the
// others.
std::vector<std::string> KillTheLast(std::vector<Child>& children) {
  auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret");
  EXPECT_TRUE(server.ok());
  for (const Child& child : children) {
    Say(child.orders.get(), std::to_string(server.value()->address().port));
  }
  for (const Child& child : children) {
    EXPECT_EQ(ReadLine(child.reports.get(), Late()), "connected");
  }
  if (children.back().pid > 0)
    ::kill(children.back().pid, SIGKILL);  // kill(-1) would kill every process
  std::vector<std::string> reports;
  for (size_t i = 0; i + 1 < children.size(); ++i) {
    reports.push_back(ReadLine(children[i].reports.get(), Late()));
  }
  for (const Child& child : children) {
    int status = 0;
    ::waitpid(child.pid, &status, 0);
  }
  return reports;
}

void AwaitInArena(Mesh& mesh, int /*orders*/, int reports) {
  const Status status = mesh.arena->AwaitAll(mesh.arena->Arrive() + 1, Late());
  Say(reports, std::string(StatusCodeName(status.code())) + ": " + status.message());
}

void AwaitLastRank(Mesh& mesh, int /*orders*/, int reports) {
  std::array<std::byte, 100> buffer;
  const int last = mesh.transport->size() - 1;
  const int peer = mesh.transport->rank() == last ? 0 : last;
  const auto ticket = mesh.transport->PostReceive(peer, Bytes(buffer.data(), buffer.size()));
  const Status status = mesh.transport->Wait(Span<const Ticket>(&ticket.value(), 1), Late());
  Say(reports, std::string(StatusCodeName(status.code())) + ": " + status.message());
}

// The last rank leaves a child behind that keeps copies of all its sockets until the test ends,
// like a worker of a data loader.
void AwaitInArenaWithAChild(Mesh& mesh, int orders, int reports) {
  if (mesh.arena->member() == mesh.arena->count() - 1 && ::fork() == 0) {
    (void)ReadLine(orders, Late());  // returns when the parent closes its end of the pipe
    ::_exit(0);
  }
  AwaitInArena(mesh, orders, reports);
}

TEST(KilledRank, WakesTheWaitersOfItsArena) {
  auto children = ForkRanks(3, AwaitInArena);
  const auto reports = KillTheLast(children);
  ASSERT_EQ(reports.size(), 2u);
  for (const std::string& report : reports) {
    // The first rank to notice leaves, and the second rank may see that first.
    EXPECT_TRUE(report == "peer_lost: lost rank 2: its process has ended" ||
                report.find(": it left the job") != std::string::npos)
        << report;
  }
  EXPECT_NE((reports[0] + reports[1]).find("lost rank 2: its process has ended"),
            std::string::npos);
}

TEST(KilledRank, IsDetectedEvenIfAChildKeepsItsSockets) {
  auto children = ForkRanks(2, AwaitInArenaWithAChild);
  const auto reports = KillTheLast(children);
  EXPECT_EQ(reports.at(0), "peer_lost: lost rank 1: its process has ended");
}

void ExpectLastRankLost(std::vector<Child> children) {
  for (const std::string& report : KillTheLast(children)) {
    EXPECT_EQ(report.find("peer_lost: receive from rank 2: lost rank 2: "), 0u) << report;
  }
}

TEST(KilledRank, WakesRanksThatReceiveFromIt) { ExpectLastRankLost(ForkRanks(3, AwaitLastRank)); }

TEST(KilledRank, WakesRanksThatReceiveFromItThroughMemory) {
  ExpectLastRankLost(ForkRanks(3, AwaitLastRank, Through::kMemory));
}

// Tests of the decoders and of the transfer of arena files.

TEST(AddressRecord, SurvivesSerialization) {
  const AddressRecord record =
      MakeRecord("::1", 65535, "name", std::string("a\0b", 3), uint64_t{1} << 40);
  const auto back = DecodeAddressRecord(EncodeAddressRecord(record));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(ToText(back.value().tcp.at(0)), "[::1]:65535");
  EXPECT_EQ(back.value().unix_name, "name");
  EXPECT_EQ(back.value().host_key, record.host_key);
  EXPECT_TRUE(back.value().shared_memory);
  EXPECT_EQ(back.value().arena_region_bytes, record.arena_region_bytes);
}

TEST(AddressRecord, IsRefusedWhenCutOrExtended) {
  const std::string whole = EncodeAddressRecord(MakeRecord("127.0.0.1", 1, "n", "h", 4096));
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(DecodeAddressRecord(whole.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(DecodeAddressRecord(whole + "x").ok());
}

TEST(Settings, SurviveSerialization) {
  const CommonSettings settings{{"capacity", std::string("a\0b", 3)}, {"size", ""}};
  const std::string whole = EncodeSettings(settings);
  const auto back = DecodeSettings(whole);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(back.value(), settings);
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(DecodeSettings(whole.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(DecodeSettings(whole + "x").ok());
  EXPECT_NE(DigestOf(settings), DigestOf({{"capacity", "a"}, {"size", ""}}));
  EXPECT_EQ(DigestOf({}), AddressRecord{}.settings_digest);
}

TEST(TransportDecoders, SurviveRandomBytes) {
  std::mt19937 random(20261121);
  const std::string whole = EncodeAddressRecord(MakeRecord("127.0.0.1", 1, "n", "h", 4096));
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = whole;
    for (int change = 0; change < 3; ++change)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)DecodeAddressRecord(bytes);
    bytes.resize(random() % 16);
    (void)DecodeAddressRecord(bytes);
    const auto header = DecodeMessageHeader(AsBytes(bytes));
    if (header.ok() && header.value().farewell) {
      EXPECT_LE(header.value().length, kMaxFarewellBytes);
    }
  }
}

TEST(MessageHeader, SurvivesSerialization) {
  const auto message = EncodeMessageHeader({false, 1234567, StatusCode::kAborted});
  const auto plain = DecodeMessageHeader(ConstBytes(message.data(), message.size()));
  EXPECT_FALSE(plain.value().farewell);
  EXPECT_EQ(plain.value().length, 1234567u);
  const auto last = EncodeMessageHeader({true, 12, StatusCode::kMismatch});
  const auto farewell = DecodeMessageHeader(ConstBytes(last.data(), last.size()));
  EXPECT_TRUE(farewell.value().farewell);
  EXPECT_EQ(farewell.value().code, StatusCode::kMismatch);
}

class ArenaFile : public testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> pair;
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
    sender_.Reset(pair[0]);
    receiver_.Reset(pair[1]);
  }
  static constexpr uint64_t kTag = 7;
  UniqueFd sender_;
  UniqueFd receiver_;
};

TEST_F(ArenaFile, ArrivesWithItsSizeFixed) {
  auto file = CreateArenaFile(8192);
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_TRUE(SendArenaFile(sender_.get(), file.value().get(), kTag, Late()).ok());
  auto received = ReceiveArenaFile(receiver_.get(), 8192, kTag, Late());
  ASSERT_TRUE(received.ok()) << received.status().message();
  EXPECT_EQ(::ftruncate(received.value().get(), 0), -1);
  EXPECT_EQ(::ftruncate(received.value().get(), 1 << 20), -1);
}

TEST_F(ArenaFile, OfAnotherMeshIsDiscarded) {
  const Holdings before = HoldingsBefore();
  for (const size_t bytes : {size_t{4096}, size_t{8192}}) {
    auto file = CreateArenaFile(bytes);
    ASSERT_TRUE(SendArenaFile(sender_.get(), file.value().get(), bytes, Late()).ok());
    ASSERT_TRUE(SendArenaFile(sender_.get(), -1, bytes + 1, Late()).ok());
  }
  auto received = ReceiveArenaFile(receiver_.get(), 8192, 8192, Late());
  ASSERT_TRUE(received.ok()) << received.status().message();
  EXPECT_EQ(Holdings().descriptors, before.descriptors + 1);
  EXPECT_EQ(ReceiveArenaFile(receiver_.get(), 8192, 8193, Late()).status().message(),
            "the creator could not share memory");
}

TEST_F(ArenaFile, IsNotReservedWhenTheHostCannotAffordIt) {
  const Status status = CreateArenaFile(size_t{1} << 50).status();
  EXPECT_EQ(status.code(), StatusCode::kIo);
  EXPECT_EQ(status.message().find("1125899906842624 bytes of shared memory exceed a quarter"), 0u)
      << status.message();
}

TEST_F(ArenaFile, IsRefusedIfItDiffersFromTheAgreement) {
  auto file = CreateArenaFile(8192);
  ASSERT_TRUE(SendArenaFile(sender_.get(), file.value().get(), kTag, Late()).ok());
  EXPECT_EQ(ReceiveArenaFile(receiver_.get(), 4096, kTag, Late()).status().message(),
            "the received file is not shared memory with a fixed size of 4096 bytes");
  const UniqueFd other(::open("/dev/null", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(SendArenaFile(sender_.get(), other.get(), kTag, Late()).ok());
  EXPECT_FALSE(ReceiveArenaFile(receiver_.get(), 0, kTag, Late()).ok());
  ASSERT_TRUE(SendArenaFile(sender_.get(), -1, kTag, Late()).ok());
  EXPECT_EQ(ReceiveArenaFile(receiver_.get(), 8192, kTag, Late()).status().message(),
            "the creator could not share memory");
  EXPECT_EQ(ReceiveArenaFile(receiver_.get(), 8192, kTag, Soon()).status().code(),
            StatusCode::kTimeout);
  sender_.Reset();
  EXPECT_EQ(ReceiveArenaFile(receiver_.get(), 8192, kTag, Late()).status().message(),
            "the creator of the shared memory has ended");
}

}  // namespace
}  // namespace sparkhvd
