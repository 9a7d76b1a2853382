#include <gtest/gtest.h>

#include <cfenv>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

Deadline Soon() { return Patience(); }

void OnEveryRank(const std::vector<int>& hosts, const EngineConfig& config,
                 const std::function<void(int, Rank&)>& body) {
  sparkhvd::OnEveryRank(InProcessMeshes(hosts), config, body);
}

class EngineSizes : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(EngineSizes, RunsEveryKindOfOperation) {
  const int size = static_cast<int>(GetParam().size());
  OnEveryRank(GetParam(), Quick(), [size](int rank, Rank& self) {
    std::vector<float> data(1000, static_cast<float>(rank + 1));
    EXPECT_TRUE(self.Allreduce("sum", data)->Wait(Soon()).ok());
    EXPECT_EQ(data[999], static_cast<float>(size * (size + 1) / 2));

    Request gather;
    gather.name = "gather";
    gather.kind = OperationKind::kAllgather;
    gather.dtype = DType::kUInt8;
    gather.shape = {rank, 2};
    const std::vector<std::byte> own(static_cast<size_t>(2 * rank), std::byte(rank));
    Result<Pointer> gathered = self.engine.Submit(gather, own.data(), nullptr);
    ASSERT_TRUE(gathered.ok());
    EXPECT_TRUE(gathered.value()->Wait(Soon()).ok());
    EXPECT_EQ(gathered.value()->output().size(), static_cast<size_t>(size * (size - 1)));
    for (int r = 0; r < size; ++r) EXPECT_EQ(gathered.value()->rows()[static_cast<size_t>(r)], r);

    Request broadcast;
    broadcast.name = "broadcast";
    broadcast.kind = OperationKind::kBroadcast;
    broadcast.root = size - 1;
    broadcast.shape = {1000};
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    data.assign(1000, static_cast<float>(rank));
    Result<Pointer> spread = self.engine.Submit(broadcast, bytes, bytes);
    ASSERT_TRUE(spread.ok());
    EXPECT_TRUE(spread.value()->Wait(Soon()).ok());
    EXPECT_EQ(data[0], static_cast<float>(size - 1));
    EXPECT_TRUE(self.BarrierAndWait("barrier").ok());
  });
}

TEST_P(EngineSizes, MatchesByNameInAnyOrder) {
  const int size = static_cast<int>(GetParam().size());
  constexpr int kTensors = 40;
  OnEveryRank(GetParam(), Quick(), [size](int rank, Rank& self) {
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> data;
      for (int i = 0; i < kTensors; ++i) data.emplace_back(17 + i, static_cast<float>(i));
      std::vector<Pointer> operations;
      for (int k = 0; k < kTensors; ++k) {
        const int i = (k * (rank % 2 == 0 ? 1 : 39) + rank * 7 + round) % kTensors;
        operations.push_back(
            self.Allreduce("tensor/" + std::to_string(i), data[static_cast<size_t>(i)]));
      }
      for (const Pointer& operation : operations) EXPECT_TRUE(operation->Wait(Soon()).ok());
      for (int i = 0; i < kTensors; ++i) {
        EXPECT_EQ(data[static_cast<size_t>(i)].back(), static_cast<float>(i * size));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, EngineSizes,
                         ::testing::Values(OneHost(1), OneHost(2), OneHost(3), OneHost(4),
                                           OneHost(7), OneHost(8), std::vector<int>{0, 0, 1, 1},
                                           std::vector<int>{0, 1, 0}));

TEST_P(EngineSizes, AWaitingCallerRunsItsOwnOperations) {
  const int size = static_cast<int>(GetParam().size());
  OnEveryRank(GetParam(), Quick(), [size](int, Rank& self) {
    for (const size_t count : {size_t{10}, size_t{30000}}) {
      for (int round = 0; round < 30; ++round) {
        std::vector<float> data(count, static_cast<float>(round));
        std::vector<float> more(3, 1.0f);
        const Pointer operation = self.AllreduceWithWaiter("waited for", data);
        const Pointer beside = round % 3 == 0 ? self.Allreduce("beside", more) : nullptr;
        EXPECT_TRUE(self.engine.Wait(*operation, Soon()).ok());
        EXPECT_EQ(data.back(), static_cast<float>(round * size));
        if (beside) {
          EXPECT_TRUE(self.engine.Wait(*beside, Soon()).ok());
        }
      }
    }
  });
}

TEST(Engine, OperationsContinueAfterTheirWaiterLeaves) {
  Gate gate(2);
  OnEveryRank(OneHost(2), Quick(), [&gate](int rank, Rank& self) {
    std::vector<float> data(4, 1.0f);
    if (rank == 1) gate.Meet();
    const Pointer operation = self.AllreduceWithWaiter("slow", data);
    if (rank == 0) {
      ExpectFailure(self.engine.Wait(*operation, Deadline::AfterSeconds(0.05)),
                    StatusCode::kTimeout, {"allreduce 'slow'", "not finished yet"});
      gate.Meet();
      EXPECT_TRUE(operation->Wait(Soon()).ok()) << "waits only";
    } else {
      self.engine.StartNow();
      EXPECT_TRUE(operation->Wait(Soon()).ok());
    }
    EXPECT_EQ(data[0], 2.0f);
  });
}

TEST(Engine, ManyThreadsWaitAndSubmitAtOnce) {
  OnEveryRank(OneHost(2), Quick(), [](int, Rank& self) {
    std::vector<std::thread> threads;
    for (int index = 0; index < 4; ++index) {
      threads.emplace_back([&self, index] {
        const std::string name = "thread/" + std::to_string(index);
        for (int round = 0; round < 50; ++round) {
          std::vector<float> data(5, 1.0f);
          const Pointer operation = (round + index) % 2 == 0 ? self.AllreduceWithWaiter(name, data)
                                                             : self.Allreduce(name, data);
          EXPECT_TRUE(self.engine.Wait(*operation, Soon()).ok());
          EXPECT_EQ(data[4], 2.0f);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Engine, AWaiterLearnsThatAPeerHasAborted) {
  Gate gate(3);
  OnEveryRank(OneHost(3), Quick(), [&gate](int rank, Rank& self) {
    EXPECT_TRUE(self.BarrierAndWait("start").ok());
    gate.Meet();
    std::vector<float> data(4);
    if (rank == 1) return self.engine.Abort("the user aborted");
    Request request;
    request.name = "x";
    request.shape = {4};
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const auto operation = self.engine.Submit(request, bytes, bytes, Start::kWithWaiter);
    const Status status =
        operation.ok() ? self.engine.Wait(*operation.value(), Soon()) : operation.status();
    ExpectFailure(status, StatusCode::kAborted, {"allreduce 'x'", "rank 1", "the user aborted"});
  });
}

TEST(Engine, SendsOnlyTheIdOfAKnownName) {
  OnEveryRank(OneHost(2), Quick(), [](int, Rank& self) {
    std::vector<float> data(8, 1.0f);
    for (int round = 0; round < 10; ++round) {
      EXPECT_TRUE(self.Allreduce("known", data)->Wait(Soon()).ok());
    }
    EXPECT_EQ(self.engine.counters().cache_hits.load(), 8u) << "stored at its second agreement";
    EXPECT_EQ(self.engine.counters().operations.load(), 10u);
  });
}

TEST(Engine, NamesThatNeverRecurDoNotEvictOthersFromTheCache) {
  EngineConfig config = Quick();
  config.cache_capacity = 1;
  OnEveryRank(OneHost(2), config, [](int, Rank& self) {
    std::vector<float> data(8, 1.0f);
    for (int round = 0; round < 10; ++round) {
      EXPECT_TRUE(self.Allreduce("known", data)->Wait(Soon()).ok());
      EXPECT_TRUE(self.Allreduce("noname." + std::to_string(round), data)->Wait(Soon()).ok());
    }
    EXPECT_EQ(self.engine.counters().cache_hits.load(), 8u);
  });
}

TEST(Engine, SurvivesACacheThatIsTooSmall) {
  EngineConfig config = Quick();
  config.cache_capacity = 3;
  OnEveryRank(OneHost(3), config, [](int rank, Rank& self) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<float>> data(7, std::vector<float>(5, 1.0f));
      std::vector<Pointer> operations;
      for (size_t k = 0; k < data.size(); ++k) {
        const size_t i = (k + static_cast<size_t>(rank * 3)) % data.size();
        operations.push_back(self.Allreduce(std::to_string(i), data[i]));
      }
      for (const Pointer& operation : operations) EXPECT_TRUE(operation->Wait(Soon()).ok());
      for (const auto& tensor : data) EXPECT_EQ(tensor[4], 3.0f);
    }
  });
}

TEST(Engine, FusesOperationsThatAreReadyTogether) {
  OnEveryRank(OneHost(2), Quick(), [](int, Rank& self) {
    // While the first cycle waits for both ranks, the other operations accumulate.
    std::vector<std::vector<float>> data(100, std::vector<float>(3, 1.0f));
    for (int round = 0; round < 10; ++round) {
      std::vector<Pointer> operations;
      for (size_t i = 0; i < data.size(); ++i) {
        data[i].assign(3, static_cast<float>(i));
        operations.push_back(self.Allreduce(std::to_string(i), data[i]));
      }
      for (const Pointer& operation : operations) EXPECT_TRUE(operation->Wait(Soon()).ok());
      for (size_t i = 0; i < data.size(); ++i) EXPECT_EQ(data[i][2], static_cast<float>(2 * i));
    }
    EXPECT_GT(self.engine.counters().fused_buffers.load(), 0u);
  });
}

// A group is ready as a whole, so it is fused as a whole. In-process arenas have slots of 16 KiB.
TEST(Engine, FusedOperationsMayExceedOneSlotOfTheArena) {
  for (const int ranks : {2, 3, 5}) {
    OnEveryRank(OneHost(ranks), Quick(), [ranks](int rank, Rank& self) {
      std::vector<std::vector<float>> data;
      std::vector<Engine::Submission> submissions;
      for (const size_t length : {1000u, 0u, 4096u, 1u, 3001u, 7u, 2999u, 17u}) {
        data.emplace_back(length, static_cast<float>(rank + 1));
      }
      data.front()[999] = 7.0f;
      for (std::vector<float>& tensor : data) {
        Request request;
        request.name = "tensor " + std::to_string(submissions.size());
        request.group = "all";
        request.group_size = static_cast<uint32_t>(data.size());
        request.shape = {static_cast<int64_t>(tensor.size())};
        request.prescale = 2.0;
        auto* bytes = reinterpret_cast<std::byte*>(tensor.data());
        submissions.push_back({std::move(request), bytes, bytes});
      }
      const auto operations = self.engine.SubmitAll(std::move(submissions));
      ASSERT_TRUE(operations.ok()) << operations.status().message();
      for (const Pointer& operation : operations.value()) {
        EXPECT_TRUE(operation->Wait(Soon()).ok());
      }
      EXPECT_EQ(data.front()[999], static_cast<float>(14 * ranks));
      data.front()[999] = data.front()[0];
      const auto sum = static_cast<float>(ranks * (ranks + 1));
      for (const auto& tensor : data) EXPECT_EQ(tensor, std::vector<float>(tensor.size(), sum));
      EXPECT_EQ(self.engine.counters().fused_buffers.load(), 1u);
      EXPECT_EQ(self.engine.counters().operations.load(), data.size());
    });
  }
}

TEST(Engine, MismatchFailsOnlyThatOperationOnEveryRank) {
  OnEveryRank(OneHost(3), Quick(), [](int rank, Rank& self) {
    std::vector<float> wrong(rank == 2 ? 5 : 4);
    std::vector<float> right(4, 1.0f);
    const Pointer bad = self.Allreduce("bad", wrong);
    const Pointer good = self.Allreduce("good", right);
    ExpectFailure(bad->Wait(Soon()), StatusCode::kMismatch,
                  {"allreduce 'bad'", "shape", "rank 0 submitted (4,)", "rank 2 submitted (5,)"});
    EXPECT_TRUE(good->Wait(Soon()).ok());
    EXPECT_EQ(right[0], 3.0f);
    std::vector<float> again(4, 1.0f);
    EXPECT_TRUE(self.Allreduce("bad", again)->Wait(Soon()).ok()) << "the name is free again";
    ExpectFailure(
        FailureOf(self.TryAllreduce("op", right, rank == 1 ? ReduceOp::kMin : ReduceOp::kMax)),
        StatusCode::kMismatch, {"allreduce 'op'", "min", "max", "rank 1"});
    ExpectFailure(FailureOf(rank == 0 ? self.TryBarrier("kind") : self.TryAllreduce("kind", right)),
                  StatusCode::kMismatch, {"'kind'", "barrier", "allreduce"});
  });
}

TEST(Engine, RefusesANameInFlightAndAnInvalidRequest) {
  OnEveryRank(OneHost(2), Quick(), [](int rank, Rank& self) {
    std::vector<float> data(4);
    if (rank == 0) {
      const Pointer first = self.Allreduce("same", data);
      ExpectFailure(FailureOf(self.TryAllreduce("same", data)), StatusCode::kInvalidArgument,
                    {"allreduce 'same'", "in flight"});
      EXPECT_TRUE(self.BarrierAndWait("go").ok());
      EXPECT_TRUE(first->Wait(Soon()).ok());
    } else {
      EXPECT_TRUE(self.BarrierAndWait("go").ok());
      EXPECT_TRUE(self.Allreduce("same", data)->Wait(Soon()).ok());
    }
  });
}

TEST(Engine, CrossedSubmissionsContinueOnceTheMissingOneArrives) {
  Gate gate(2);
  OnEveryRank(OneHost(2), Quick(), [&gate](int rank, Rank& self) {
    std::vector<float> first(4, 1.0f);
    std::vector<float> second(4, 1.0f);
    // Each rank waits for an operation that the other rank has not submitted, and submits its other
    // operation only after both waits have timed out.
    const Pointer early = self.Allreduce(rank == 0 ? "a" : "b", first);
    EXPECT_EQ(early->Wait(Deadline::AfterSeconds(0.05)).code(), StatusCode::kTimeout);
    gate.Meet();
    const Pointer late = self.Allreduce(rank == 0 ? "b" : "a", second);
    EXPECT_TRUE(early->Wait(Soon()).ok());
    EXPECT_TRUE(late->Wait(Soon()).ok());
  });
}

TEST(Engine, AnOperationThatOtherRanksNeverSubmitTimesOutAndNamesThem) {
  OnEveryRank(OneHost(3), Quick(0.3), [](int rank, Rank& self) {
    // Every rank waits for a different operation, so the cycles continue and the coordinator knows
    // which rank misses which operation.
    std::vector<float> data(4);
    const std::string name = "only/" + std::to_string(rank);
    const Status status = self.Allreduce(name, data)->Wait(Soon());
    ExpectFailure(status, StatusCode::kTimeout,
                  {"allreduce '" + name + "'", "not submitted by rank"});
    EXPECT_TRUE(self.BarrierAndWait("after").ok()) << "the engine continues";
  });
}

TEST(Engine, AMissingRankIsNamedWithTheWaitingTensors) {
  for (const int absent : {0, 2}) {
    OnEveryRank(OneHost(3), Quick(0.3), [absent](int rank, Rank& self) {
      if (rank == absent) return;
      std::vector<float> data(4);
      const Status status = FailureOf(self.TryAllreduce("lonely", data));
      ExpectFailure(status, StatusCode::kTimeout,
                    {"allreduce 'lonely'", "rank " + std::to_string(absent)});
    });
  }
}

TEST(Engine, AbortEndsTheOperationsOfAllRanksWithTheReason) {
  Gate gate(3);
  OnEveryRank(OneHost(3), Quick(), [&gate](int rank, Rank& self) {
    EXPECT_TRUE(self.BarrierAndWait("start").ok());
    gate.Meet();  // an abort ends every pending operation, which must not include the barrier
    std::vector<float> data(4);
    if (rank == 1) return self.engine.Abort("the user aborted");
    ExpectFailure(FailureOf(self.TryAllreduce("x", data)), StatusCode::kAborted,
                  {"allreduce 'x'", "rank 1", "the user aborted"});
    ExpectFailure(FailureOf(self.TryAllreduce("y", data)), StatusCode::kAborted,
                  {"the user aborted"});
  });
}

TEST(Engine, ARankThatLeavesEarlyIsNamedToTheRanksThatNeedIt) {
  for (const int leaver : {0, 1}) {
    Gate gate(3);
    OnEveryRank(OneHost(3), Quick(), [leaver, &gate](int rank, Rank& self) {
      EXPECT_TRUE(self.BarrierAndWait("start").ok());
      gate.Meet();  // a rank that needs the leaver fails all ranks, which must not fail the barrier
      if (rank == leaver) {
        EXPECT_TRUE(self.engine.Shutdown(Soon()).ok());
        return;
      }
      std::vector<float> data(4);
      ExpectFailure(FailureOf(self.TryAllreduce("needed", data)), StatusCode::kPeerLost,
                    {"allreduce 'needed'", "rank " + std::to_string(leaver)});
    });
  }
}

TEST(Engine, ShutdownFailsPendingOperationsOfItsRank) {
  OnEveryRank(OneHost(2), Quick(), [](int rank, Rank& self) {
    if (rank == 1) return;
    std::vector<float> data(4);
    const Pointer pending = self.Allreduce("pending", data);
    EXPECT_TRUE(self.engine.Shutdown(Soon()).ok());
    ExpectFailure(pending->Wait(Soon()), StatusCode::kShutDown, {"allreduce 'pending'"});
    ExpectFailure(FailureOf(self.TryAllreduce("later", data)), StatusCode::kShutDown,
                  {"shut down"});
    EXPECT_TRUE(self.engine.Shutdown(Soon()).ok()) << "a second shutdown does nothing";
  });
}

TEST(Engine, ARankThatShutsDownWithPendingOperationsIsLostForTheOthers) {
  for (const std::vector<int>& hosts : {OneHost(2), {0, 1}}) {
    Gate gate(2);
    OnEveryRank(hosts, Quick(), [&gate](int rank, Rank& self) {
      std::vector<float> data(4);
      const Pointer pending = self.Allreduce("pending " + std::to_string(rank), data);
      gate.Meet();  // both ranks wait for each other
      if (rank == 1) {
        EXPECT_TRUE(self.engine.Shutdown(Soon()).ok());
        return;
      }
      ExpectFailure(pending->Wait(Soon()), StatusCode::kPeerLost, {"rank 1"});
      ExpectFailure(FailureOf(self.TryAllreduce("later", data)), StatusCode::kPeerLost, {"rank 1"});
      EXPECT_EQ(self.engine.Failure().code(), StatusCode::kPeerLost);
    });
  }
}

TEST(Engine, ResultsDoNotDependOnTheRoundingOfTheCallingThread) {
  OnEveryRank(OneHost(2), Quick(), [](int rank, Rank& self) {
    std::vector<float> data(40, rank == 0 ? 1.0f : 0x1p-30f);
    const std::vector<float> sum(data.size(), 1.0f);
    std::vector<float> direct = data;
    ASSERT_EQ(std::fesetround(rank == 0 ? FE_UPWARD : FE_TONEAREST), 0);
    EXPECT_TRUE(self.engine.Wait(*self.AllreduceWithWaiter("x", data), Soon()).ok());
    const Reduction reduction{DType::kFloat32, ReduceOp::kSum, 1.0, 1.0};
    std::byte* const bytes = BytesOf(direct);
    const auto never = [] { return false; };
    EXPECT_TRUE(self.engine.AllreduceNow(reduction, bytes, bytes, direct.size(), never).ok());
    EXPECT_EQ(std::fegetround(), rank == 0 ? FE_UPWARD : FE_TONEAREST);
    EXPECT_EQ(data, sum);
    EXPECT_EQ(direct, sum);
  });
}

TEST(Engine, RanksThatLeaveTogetherReportNoFailure) {
  for (int round = 0; round < 30; ++round) {
    OnEveryRank(round % 2 == 0 ? OneHost(3) : std::vector<int>{0, 1, 2}, Quick(),
                [](int, Rank& self) {
                  std::vector<float> data(50000, 1.0f);
                  EXPECT_TRUE(self.Allreduce("last", data)->Wait(Soon()).ok());
                  EXPECT_TRUE(self.engine.Shutdown(Soon()).ok());
                  EXPECT_EQ(data[49999], 3.0f);
                });
  }
}

}  // namespace
}  // namespace sparkhvd
