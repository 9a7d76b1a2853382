// Tests calls without negotiation, at the same time as the engine's own operations.
#include <gtest/gtest.h>

#include <atomic>
#include <utility>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

bool Never() { return false; }

Status Now(Rank& self, std::vector<float>& data, ReduceOp op = ReduceOp::kSum,
           const std::function<bool()>& interrupted = Never) {
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Reduction reduction{DType::kFloat32, op, 1.0, 1.0};
  return self.engine.AllreduceNow(reduction, bytes, bytes, data.size(), interrupted);
}

class DirectCallSizes : public ::testing::TestWithParam<int> {};

TEST_P(DirectCallSizes, AreMatchedByOrder) {
  const int size = GetParam();
  OnEveryRank(InProcessMeshes(OneHost(size)), Quick(), [size](int rank, Rank& self) {
    ASSERT_TRUE(self.engine.has_direct_calls());
    for (const size_t count : {0u, 1u, 7u, 4096u, 4097u, 100003u}) {
      for (int round = 0; round < 5; ++round) {
        std::vector<float> data(count, static_cast<float>(rank + round));
        EXPECT_TRUE(Now(self, data).ok());
        const auto sum = static_cast<float>(size * (size - 1) / 2 + size * round);
        EXPECT_EQ(data, std::vector<float>(count, sum));
      }
    }
    std::vector<float> mean(3, static_cast<float>(2 * rank));
    EXPECT_TRUE(Now(self, mean, ReduceOp::kAverage).ok());
    EXPECT_EQ(mean[2], static_cast<float>(size - 1));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, DirectCallSizes, ::testing::Values(2, 3, 8));

TEST(DirectCalls, RunBesideTheEngine) {
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [](int rank, Rank& self) {
    for (int round = 0; round < 30; ++round) {
      std::vector<float> named(20000, 1.0f);
      std::vector<float> direct(20000, 2.0f);
      // One rank submits first, and the other one calls first. Neither kind waits for the other
      // kind.
      const Pointer before = rank == 0 ? self.Allreduce("named", named) : nullptr;
      EXPECT_TRUE(Now(self, direct).ok());
      const Pointer operation = before ? before : self.Allreduce("named", named);
      EXPECT_TRUE(self.engine.Wait(*operation, Patience()).ok());
      EXPECT_EQ(named[19999], 2.0f);
      EXPECT_EQ(direct[19999], 4.0f);
    }
  });
}

TEST(DirectCalls, AMismatchFailsOnEveryRankAndTheNextCallWorks) {
  OnEveryRank(InProcessMeshes(OneHost(3)), Quick(), [](int rank, Rank& self) {
    std::vector<float> data(rank == 2 ? 100000 : 5, 1.0f);
    ExpectFailure(Now(self, data), StatusCode::kMismatch,
                  {"sum of 5 x float32", "rank 2", "100000"});
    std::vector<float> next(5, 1.0f);
    EXPECT_TRUE(Now(self, next).ok());
    EXPECT_EQ(next[0], 3.0f);
  });
}

TEST(DirectCalls, AnInterruptedWaitEndsTheJobWithTheReason) {
  Gate gate(2);
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [&gate](int rank, Rank& self) {
    std::vector<float> data(5);
    if (rank == 0) {
      ExpectFailure(Now(self, data, ReduceOp::kSum, [] { return true; }), StatusCode::kAborted,
                    {"interrupted"});
      gate.Meet();
    } else {
      gate.Meet();
      EXPECT_TRUE(Now(self, data).ok()) << "the contribution of the other rank is present";
      ExpectFailure(Now(self, data), StatusCode::kAborted, {"interrupted"});
    }
  });
}

TEST(DirectCalls, AMissingRankIsNamed) {
  OnEveryRank(InProcessMeshes(OneHost(3)), Quick(0.2), [](int rank, Rank& self) {
    if (rank == 2) return;
    std::vector<float> data(5);
    ExpectFailure(Now(self, data), StatusCode::kTimeout, {"rank 2"});
  });
}

TEST(DirectCalls, ShutdownEndsAWaitingCall) {
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [](int rank, Rank& self) {
    if (rank == 1) return;
    std::atomic<bool> waits{false};
    std::thread caller([&] {
      std::vector<float> data(5);
      const Status status = Now(self, data, ReduceOp::kSum, [&] {
        waits = true;
        return false;
      });
      EXPECT_EQ(status.code(), StatusCode::kShutDown) << status.message();
    });
    while (!waits) std::this_thread::yield();
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
    caller.join();
  });
}

TEST(DirectCalls, ASignalHandlerCannotCallDuringACall) {
  Gate gate(2);
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [&gate](int rank, Rank& self) {
    if (rank == 1) gate.Meet();
    bool handled = false;
    const auto handle_signal = [&] {
      if (std::exchange(handled, true)) return false;
      std::vector<float> other(5);
      ExpectFailure(Now(self, other), StatusCode::kInvalidArgument, {"a signal handler cannot"});
      gate.Meet();
      return false;
    };
    std::vector<float> data(5, 1.0f);
    EXPECT_TRUE(rank == 0 ? Now(self, data, ReduceOp::kSum, handle_signal).ok()
                          : Now(self, data).ok());
    EXPECT_EQ(data[0], 2.0f);
  });
}

TEST(DirectCalls, ASignalHandlerMayShutDownDuringACall) {
  Gate gate(2);
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [&gate](int rank, Rank& self) {
    std::vector<float> data(5);
    if (rank == 0) {
      const auto handle_signal = [&self] {
        EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
        return false;
      };
      const Status status = Now(self, data, ReduceOp::kSum, handle_signal);
      EXPECT_EQ(status.code(), StatusCode::kShutDown) << status.message();
      gate.Meet();
    } else {
      gate.Meet();
      EXPECT_TRUE(Now(self, data).ok()) << "the contribution of the other rank is present";
      ExpectFailure(Now(self, data), StatusCode::kPeerLost, {"rank 0"});
    }
  });
}

}  // namespace
}  // namespace sparkhvd
