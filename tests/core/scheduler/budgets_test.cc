// Limits the cost of an operation for a rank by the number of ranks: messages over links and their
// bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/thorough.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"
#include "scheduler/negotiation_tree.h"
#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

struct Traffic {
  std::atomic<size_t> messages{0};
  std::atomic<size_t> bytes{0};
};

// Counts the messages and bytes that a rank sends.
class CountingTransport final : public Transport {
 public:
  CountingTransport(std::unique_ptr<Transport> transport, Traffic& traffic)
      : transport_(std::move(transport)), traffic_(traffic) {}

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    ++traffic_.messages;
    traffic_.bytes += data.size();
    return transport_->PostSend(peer, data);
  }
  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return transport_->PostReceive(peer, data);
  }
  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return transport_->PostReceiveUpTo(peer, data, length);
  }
  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    return transport_->Wait(tickets, deadline);
  }
  void Abort(const Status& why) override { transport_->Abort(why); }

 private:
  const std::unique_ptr<Transport> transport_;
  Traffic& traffic_;
};

struct Cost {
  size_t messages = 0;
  size_t bytes = 0;
};

constexpr size_t kFrame = 256;   // a message of the negotiation
constexpr int64_t kRows = 1024;  // so that the slices of all ranks are equal
constexpr size_t kBytes = 4096;  // of kRows floats

// The request of a rank, and its cost beyond the negotiation.
struct Budget {
  OperationKind kind;
  Cost (*data)(size_t ranks);
};

size_t RoundsFor(size_t ranks) {
  size_t rounds = 0;
  while ((size_t{1} << rounds) < ranks) ++rounds;
  return rounds;
}

const std::vector<Budget> kBudgets{
    {OperationKind::kAllreduce,
     [](size_t ranks) {
       const size_t rounds = RoundsFor(ranks);
       return Cost{rounds, rounds * kBytes};
     }},
    {OperationKind::kAllgather,
     [](size_t ranks) { return Cost{2 * RoundsFor(ranks), (ranks - 1) * kBytes}; }},
    {OperationKind::kReducescatter,
     [](size_t ranks) { return Cost{RoundsFor(ranks), (ranks - 1) * kBytes / ranks}; }},
    {OperationKind::kAlltoall,
     [](size_t ranks) {
       const size_t rows = 8 * (ranks - 1);  // their number for each rank
       return Cost{ranks - 1, rows + (ranks - 1) * kBytes / ranks};
     }},
    {OperationKind::kBroadcast,
     [](size_t ranks) {
       const size_t rounds = RoundsFor(ranks);
       return Cost{rounds, rounds * kBytes};
     }},
    {OperationKind::kBarrier,
     [](size_t ranks) {
       const size_t rounds = RoundsFor(ranks);
       return Cost{rounds, rounds};
     }},
};

Request RequestOf(OperationKind kind, int size) {
  Request request;
  request.kind = kind;
  request.name = "tensor";
  request.shape = {kind == OperationKind::kBarrier ? 0 : kRows};
  if (kind == OperationKind::kAlltoall) {
    request.splits.assign(static_cast<size_t>(size), kRows / size);
  }
  return request;
}

// Runs the operation `times` times, of which the first `free` do not count, on ranks with these
// hosts. Returns the highest cost of a run by rank.
std::vector<Cost> Measure(const std::vector<int>& hosts, OperationKind kind, int free, int times) {
  std::vector<Traffic> traffic(hosts.size());
  std::vector<Cost> costs(hosts.size());
  std::vector<Mesh> meshes = InProcessMeshes(hosts);
  for (size_t rank = 0; rank < meshes.size(); ++rank) {
    auto& transport = meshes[rank].transport;
    transport = std::make_unique<CountingTransport>(std::move(transport), traffic[rank]);
  }
  const int size = static_cast<int>(hosts.size());
  OnEveryRank(std::move(meshes), Quick(), [&](int rank, Rank& self) {
    const Traffic& own = traffic[static_cast<size_t>(rank)];
    Cost& cost = costs[static_cast<size_t>(rank)];
    std::vector<float> source(kRows, 1.0f);
    std::vector<float> target(kRows);
    for (int time = 0; time < times; ++time) {
      const size_t messages = own.messages;
      const size_t bytes = own.bytes;
      const auto operation = self.engine.Submit(RequestOf(kind, size),
                                                reinterpret_cast<const std::byte*>(source.data()),
                                                reinterpret_cast<std::byte*>(target.data()));
      ASSERT_TRUE(operation.ok()) << operation.status().message();
      const Status status = operation.value()->Wait(Patience());
      ASSERT_TRUE(status.ok()) << status.message();
      if (time < free) continue;
      cost.messages = std::max(cost.messages, own.messages - messages);
      cost.bytes = std::max(cost.bytes, own.bytes - bytes);
    }
  });
  return costs;
}

std::vector<int> OwnHosts(int size) {
  std::vector<int> hosts(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) hosts[static_cast<size_t>(rank)] = rank;
  return hosts;
}

class Budgets : public ::testing::TestWithParam<int> {
 protected:
  size_t ranks() const { return static_cast<size_t>(GetParam()); }

  // One message to every child in the tree, and one to the parent.
  size_t Frames(size_t rank) const {
    const PlaceInTree place(static_cast<int>(rank), GetParam(), kFanIn);
    return place.children.size() + (rank > 0 ? 1 : 0);
  }
};

TEST(Budget, NoRankOfAThousandExchangesMoreThanFiftyMessagesPerCycle) {
  for (int rank = 0; rank < 1024; ++rank) {
    EXPECT_LE(PlaceInTree(rank, 1024, kFanIn).children.size() + 1, 50u) << rank;
  }
}

TEST_P(Budgets, ARepeatedOperationCostsOneFrameAndItsData) {
  for (const Budget& budget : kBudgets) {
    const std::vector<Cost> costs = Measure(OwnHosts(GetParam()), budget.kind, 2, 4);
    const Cost data = budget.data(ranks());
    for (size_t rank = 0; rank < ranks(); ++rank) {
      const size_t frames = Frames(rank);
      EXPECT_LE(costs[rank].messages, data.messages + frames) << Name(budget.kind) << ", " << rank;
      EXPECT_LE(costs[rank].bytes, data.bytes + frames * kFrame)
          << Name(budget.kind) << ", " << rank;
    }
  }
}

// The first time, ranks send their requests in full, and rank 0 answers with the rows of all ranks
// where the operation needs them.
TEST_P(Budgets, ANewOperationCostsItsRequestAndNoTableOfAllPairs) {
  for (const Budget& budget : kBudgets) {
    const std::vector<Cost> costs = Measure(OwnHosts(GetParam()), budget.kind, 0, 1);
    const Cost data = budget.data(ranks());
    const size_t rows = budget.kind == OperationKind::kAllgather ? 8 * ranks() : 0;
    for (size_t rank = 0; rank < ranks(); ++rank) {
      const size_t frames = Frames(rank);
      EXPECT_LE(costs[rank].messages, data.messages + 2 * frames)
          << Name(budget.kind) << ", " << rank;
      EXPECT_LE(costs[rank].bytes, data.bytes + frames * (kFrame + rows))
          << Name(budget.kind) << ", " << rank;
    }
  }
}

TEST_P(Budgets, RanksThatShareMemoryUseNoLinks) {
  for (const Budget& budget : kBudgets) {
    for (const Cost& cost : Measure(OneHost(GetParam()), budget.kind, 0, 2)) {
      EXPECT_EQ(cost.messages, 0u) << Name(budget.kind);
    }
  }
}

TEST_P(Budgets, TheEndOfAllRanksCostsEachTwoRequests) {
  auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret");
  ASSERT_TRUE(server.ok()) << server.status().message();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < GetParam(); ++rank) {
    threads.emplace_back([&, rank] {
      auto client = TcpStoreClient::Connect({server.value()->address()}, "secret", Patience());
      ASSERT_TRUE(client.ok()) << client.status().message();
      const FailureBoard board{std::move(client).value(), "test"};
      const Status status = board.AwaitAllDone(rank, GetParam(), Patience());
      EXPECT_TRUE(status.ok()) << status.message();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(server.value()->requests(), 2 * ranks());
}

std::vector<int> BudgetSizes() {
  return Thorough() ? std::vector<int>{4, 8, 16, 32, 64} : std::vector<int>{4, 8, 16};
}

INSTANTIATE_TEST_SUITE_P(Ranks, Budgets, ::testing::ValuesIn(BudgetSizes()));

}  // namespace
}  // namespace sparkhvd
