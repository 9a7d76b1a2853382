// Tests the engine over the links of real jobs: shared memory within a host, and sockets.
#include <gtest/gtest.h>

#include "scheduler/rank.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

constexpr int kSize = 3;

void OnOneHost(MeshOptions*) {}
void OnOneHostWithoutSharedMemory(MeshOptions* options) { options->shared_memory = false; }
void OnSeparateHosts(MeshOptions* options) { options->host_key = std::to_string(options->rank); }
void OnTwoHosts(MeshOptions* options) { options->host_key = std::to_string(options->rank % 2); }

struct LinkLayout {
  const char* name;
  void (*set_host)(MeshOptions*);
  std::vector<int> neighbours_of_rank_0;
  bool through_memory = false;  // like a process set of these ranks
};

void PrintTo(const LinkLayout& layout, std::ostream* out) { *out << layout.name; }

class EngineLinks : public ::testing::TestWithParam<LinkLayout> {
 protected:
  void OnEveryRank(const std::function<void(int, Rank&)>& body, double timeout_s = 30) {
    std::vector<Mesh> meshes = Connect(kSize, GetParam().set_host);
    if (GetParam().through_memory) meshes = ConnectNeighbors(meshes);
    sparkhvd::OnEveryRank(std::move(meshes), Quick(timeout_s), body);
  }
};

// All weights are exact in float32.
double Weight(int rank, size_t tensor, int round) {
  return static_cast<double>((static_cast<size_t>(rank * 3 + round) + tensor) % 5) / 4;
}

float WeightedSum(size_t tensor, int round) {
  double sum = 0;
  for (int rank = 0; rank < kSize; ++rank) sum += Weight(rank, tensor, round) * (rank + 1);
  return static_cast<float>(sum);
}

TEST_P(EngineLinks, CarriesEveryKindOfOperation) {
  OnEveryRank([](int rank, Rank& self) {
    if (rank == 0) {
      EXPECT_EQ(self.engine.local_ranks(), GetParam().neighbours_of_rank_0);
    }
    for (const size_t count : {size_t{1}, size_t{100003}}) {
      std::vector<float> data(count, static_cast<float>(rank + 1));
      EXPECT_TRUE(self.Allreduce("sum", data)->Wait(Late()).ok());
      EXPECT_EQ(data, std::vector<float>(count, 6.0f));

      Request gather;
      gather.name = "gather";
      gather.kind = OperationKind::kAllgather;
      gather.dtype = DType::kUInt8;
      gather.shape = {static_cast<int64_t>(count) * rank};
      const std::vector<std::byte> own(count * static_cast<size_t>(rank), std::byte(rank));
      Result<Pointer> gathered = self.engine.Submit(gather, own.data(), nullptr);
      ASSERT_TRUE(gathered.ok());
      ASSERT_TRUE(gathered.value()->Wait(Late()).ok());
      std::vector<std::byte> expected(count, std::byte(1));
      expected.insert(expected.end(), 2 * count, std::byte(2));
      const Bytes output = gathered.value()->output();
      EXPECT_EQ(std::vector<std::byte>(output.data(), output.data() + output.size()), expected);

      Request broadcast;
      broadcast.name = "broadcast";
      broadcast.kind = OperationKind::kBroadcast;
      broadcast.root = 1;
      broadcast.shape = {static_cast<int64_t>(count)};
      data.assign(count, static_cast<float>(rank));
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      Result<Pointer> broadcasted = self.engine.Submit(broadcast, bytes, bytes);
      ASSERT_TRUE(broadcasted.ok());
      EXPECT_TRUE(broadcasted.value()->Wait(Late()).ok());
      EXPECT_EQ(data, std::vector<float>(count, 1.0f));
    }
    EXPECT_TRUE(self.BarrierAndWait("end").ok());
  });
}

TEST_P(EngineLinks, EveryRankScalesItsOwnContributionEvenInFusedOperations) {
  constexpr size_t kTensors = 30;
  constexpr int kRounds = 5;
  OnEveryRank([](int rank, Rank& self) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<float>> data;
      for (size_t i = 0; i < kTensors; ++i) data.emplace_back(i + 1, static_cast<float>(rank + 1));
      std::vector<Pointer> operations;
      for (size_t i = 0; i < kTensors; ++i) {
        operations.push_back(
            self.Allreduce("tensor/" + std::to_string(i), data[i], Weight(rank, i, round)));
      }
      for (size_t i = 0; i < kTensors; ++i) {
        EXPECT_TRUE(operations[i]->Wait(Late()).ok());
        EXPECT_EQ(data[i], std::vector<float>(i + 1, WeightedSum(i, round))) << i;
      }
    }
    EXPECT_GT(self.engine.counters().fused_buffers.load(), 0u);
    EXPECT_EQ(self.engine.counters().cache_hits.load(), kTensors * (kRounds - 2))
        << "a different prescale factor needs no new negotiation";
  });
}

TEST_P(EngineLinks, TheReasonOfAnAbortReachesAllRanks) {
  OnEveryRank([](int rank, Rank& self) {
    std::vector<float> data(4);
    if (rank == 1) return self.engine.Abort("the user aborted");
    ExpectFailure(FailureOf(self.TryAllreduce("x", data)), StatusCode::kAborted,
                  {"allreduce 'x'", "rank 1", "the user aborted"});
  });
}

TEST_P(EngineLinks, TheErrorNamesARankThatLeft) {
  Gate gate(3);
  OnEveryRank([&gate](int rank, Rank& self) {
    EXPECT_TRUE(self.BarrierAndWait("start").ok());
    gate.Meet();  // the failure of the allreduce ends all engines, so all ranks must pass the
                  // barrier first
    if (rank == 2) {
      EXPECT_TRUE(self.engine.Shutdown(Late()).ok());
      return;
    }
    std::vector<float> data(4);
    ExpectFailure(FailureOf(self.TryAllreduce("needed", data)), StatusCode::kPeerLost,
                  {"allreduce 'needed'", "rank 2"});
  });
}

TEST_P(EngineLinks, TheTimeoutNamesAMissingRank) {
  Gate gate(2);
  OnEveryRank(
      [&gate](int rank, Rank& self) {
        if (rank == 2) return;
        // Rank 1 waits half of the timeout longer than rank 0, from its own submission on.
        gate.Meet();
        std::vector<float> data(4);
        ExpectFailure(FailureOf(self.TryAllreduce("lonely", data)), StatusCode::kTimeout,
                      {"allreduce 'lonely'", "rank 2"});
      },
      0.6);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, EngineLinks,
    ::testing::Values(LinkLayout{"OneHost", OnOneHost, {0, 1, 2}},
                      LinkLayout{"Neighbors", OnOneHost, {0, 1, 2}, true},
                      LinkLayout{"OneHostWithoutSharedMemory", OnOneHostWithoutSharedMemory, {0}},
                      LinkLayout{"SeparateHosts", OnSeparateHosts, {0}},
                      LinkLayout{"TwoHosts", OnTwoHosts, {0, 2}}),
    [](const auto& chosen) { return std::string(chosen.param.name); });

}  // namespace
}  // namespace sparkhvd
