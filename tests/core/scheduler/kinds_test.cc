// Tests the engine's operations on rows, groups of operations, and ranks that have joined.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

using Submission = Engine::Submission;

Request Of(OperationKind kind, const std::string& name, std::vector<int64_t> shape) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.shape = std::move(shape);
  return request;
}

std::vector<float> FloatsOf(const Operation& operation) {
  std::vector<float> values(operation.output().size() / sizeof(float));
  if (!values.empty()) {
    std::memcpy(values.data(), operation.output().data(), operation.output().size());
  }
  return values;
}

Result<Pointer> TryJoin(Rank& self) {
  return self.engine.Submit(Of(OperationKind::kJoin, kJoinName, {0}), nullptr, nullptr);
}

// Submits the tensors as one group of allreduces. `names` distinguishes them.
Result<std::vector<Pointer>> TryGroup(Rank& self, const std::string& group,
                                      const std::vector<std::string>& names,
                                      std::vector<std::vector<float>>& data) {
  std::vector<Submission> submissions;
  for (size_t i = 0; i < names.size(); ++i) {
    Request request =
        Of(OperationKind::kAllreduce, names[i], {static_cast<int64_t>(data[i].size())});
    request.group = group;
    request.group_size = static_cast<uint32_t>(names.size());
    submissions.push_back({std::move(request), BytesOf(data[i]), BytesOf(data[i])});
  }
  return self.engine.SubmitAll(std::move(submissions));
}

class EngineKinds : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
  void Run(const std::function<void(int, Rank&)>& body) const {
    OnEveryRank(InProcessMeshes(GetParam()), Quick(), body);
  }
};

TEST_P(EngineKinds, ReducescatterAssignsTheFirstRanksOneMoreRow) {
  Run([this](int rank, Rank& self) {
    for (int round = 0; round < 3; ++round) {
      const int64_t rows = size() + 1;
      std::vector<float> source(static_cast<size_t>(rows) * 3);
      std::iota(source.begin(), source.end(), static_cast<float>(rank));
      std::vector<float> target(rank == 0 ? 6 : 3);
      Result<Pointer> operation =
          self.engine.Submit(Of(OperationKind::kReducescatter, "scatter", {rows, 3}),
                             BytesOf(source), BytesOf(target));
      ASSERT_TRUE(operation.ok());
      ASSERT_TRUE(operation.value()->Wait(Patience()).ok());
      const size_t first = rank == 0 ? 0 : static_cast<size_t>(rank + 1) * 3;
      for (size_t i = 0; i < target.size(); ++i) {
        const float sum = static_cast<float>(first + i) * static_cast<float>(size()) +
                          static_cast<float>(size() * (size() - 1) / 2);
        EXPECT_EQ(target[i], sum);
      }
    }
  });
}

TEST_P(EngineKinds, AlltoallReturnsTheRowsReceivedFromEveryRank) {
  Run([this](int rank, Rank& self) {
    // The second and the third round are requested by id, the third with other splits.
    for (const int more : {0, 0, 1}) {
      std::vector<int64_t> splits;
      std::vector<float> source;
      for (int to = 0; to < size(); ++to) {
        splits.push_back((rank + to) % 2 + more);
        source.insert(source.end(), static_cast<size_t>(splits.back()),
                      static_cast<float>(rank * 10 + to));
      }
      Request request =
          Of(OperationKind::kAlltoall, "exchange", {static_cast<int64_t>(source.size())});
      request.splits = splits;
      Result<Pointer> operation = self.engine.Submit(request, BytesOf(source), nullptr);
      ASSERT_TRUE(operation.ok());
      ASSERT_TRUE(operation.value()->Wait(Patience()).ok());
      std::vector<float> expected;
      for (int from = 0; from < size(); ++from) {
        const int rows = (rank + from) % 2 + more;
        EXPECT_EQ(operation.value()->rows()[static_cast<size_t>(from)], rows);
        expected.insert(expected.end(), static_cast<size_t>(rows),
                        static_cast<float>(from * 10 + rank));
      }
      EXPECT_EQ(FloatsOf(*operation.value()), expected);
    }
  });
}

TEST_P(EngineKinds, JoinedRanksContributeNothingUntilAllHaveJoined) {
  // The last rank joins after rank 0 was rejected, because after the last join no rank is joined
  // any more.
  Gate refused[3]{Gate(2), Gate(2), Gate(2)};
  Run([this, &refused](int rank, Rank& self) {
    for (Gate& rank_0_was_refused : refused) {
      // Rank r makes r more steps than rank 0 and joins. Names and lengths are cached from turn two
      // on.
      for (int step = 0; step < rank; ++step) {
        std::vector<float> data(5, 1.0f);
        EXPECT_TRUE(self.Allreduce("step/" + std::to_string(step), data)->Wait(Patience()).ok());
        EXPECT_EQ(data[4], static_cast<float>(size() - 1 - step)) << "in step " << step;
        std::vector<float> lowest(5, static_cast<float>(rank));
        EXPECT_TRUE(self.TryAllreduce("min/" + std::to_string(step), lowest, ReduceOp::kMin)
                        .value()
                        ->Wait(Patience())
                        .ok());
        EXPECT_EQ(lowest[0], static_cast<float>(step + 1));
        std::vector<float> own(static_cast<size_t>(rank), static_cast<float>(rank));
        Result<Pointer> gathered = self.engine.Submit(
            Of(OperationKind::kAllgather, "rows/" + std::to_string(step), {rank}), BytesOf(own),
            nullptr);
        ASSERT_TRUE(gathered.ok());
        EXPECT_TRUE(gathered.value()->Wait(Patience()).ok());
        for (int r = 0; r < size(); ++r) {
          EXPECT_EQ(gathered.value()->rows()[static_cast<size_t>(r)], r > step ? r : 0);
        }
      }
      if (size() > 1 && rank == size() - 1) rank_0_was_refused.Meet();
      Result<Pointer> join = TryJoin(self);
      ASSERT_TRUE(join.ok());
      if (size() > 1 && rank == 0) {
        std::vector<float> late(1);
        ExpectFailure(FailureOf(self.TryAllreduce("late", late)), StatusCode::kInvalidArgument,
                      {"has joined"});
        rank_0_was_refused.Meet();
      }
      ASSERT_TRUE(join.value()->Wait(Patience()).ok());
      EXPECT_EQ(join.value()->rows(), std::vector<int64_t>{size() - 1});
      std::vector<float> after(3, 1.0f);
      EXPECT_TRUE(self.Allreduce("after", after)->Wait(Patience()).ok());
      EXPECT_EQ(after[0], static_cast<float>(size()));
    }
  });
}

TEST_P(EngineKinds, AGroupRunsTogetherInAnyOrderOfGroups) {
  Run([this](int rank, Rank& self) {
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> data(6, std::vector<float>(11, 1.0f));
      std::vector<std::vector<float>> others(data);
      const auto submit = [&](const std::string& group, std::vector<std::vector<float>>& tensors) {
        std::vector<std::string> names;
        for (int i = 0; i < 6; ++i) names.push_back(group + "." + std::to_string(i));
        Result<std::vector<Pointer>> operations = TryGroup(self, group, names, tensors);
        EXPECT_TRUE(operations.ok()) << operations.status().message();
        return std::move(operations).value();
      };
      std::vector<Pointer> one;
      std::vector<Pointer> two;
      if (rank % 2 == 0) {
        one = submit("one", data);
        two = submit("two", others);
      } else {
        two = submit("two", others);
        one = submit("one", data);
      }
      for (const auto& operations : {one, two}) {
        for (const Pointer& operation : operations) {
          EXPECT_TRUE(operation->Wait(Patience()).ok());
        }
      }
      for (const auto& tensor : data) EXPECT_EQ(tensor[10], static_cast<float>(size()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, EngineKinds,
                         ::testing::Values(OneHost(1), OneHost(2), OneHost(3), OneHost(4),
                                           OneHost(5), OneHost(8), std::vector<int>{0, 0, 1, 1},
                                           std::vector<int>{0, 1, 0}));

TEST(EngineGroups, AMismatchInOneTensorFailsTheWholeGroupOnEveryRank) {
  for (const std::vector<int>& hosts : {OneHost(3), std::vector<int>{0, 1, 2}}) {
    OnEveryRank(InProcessMeshes(hosts), Quick(), [](int rank, Rank& self) {
      for (const bool known : {false, true}) {
        std::vector<std::vector<float>> data(4, std::vector<float>(4, 1.0f));
        const std::vector<std::string> names{"g.0", "g.1", "g.2", "g.3"};
        for (int run = 0; known && run < 2; ++run) {  // from then on, the others request by id
          const auto group = TryGroup(self, "g", names, data);
          ASSERT_TRUE(group.ok());
          for (const Pointer& operation : group.value()) {
            EXPECT_TRUE(operation->Wait(Patience()).ok());
          }
        }
        if (rank == 2) data[1].resize(5);
        const auto operations = TryGroup(self, "g", names, data);
        ASSERT_TRUE(operations.ok());
        for (size_t i = 0; i < 4; ++i) {
          ExpectFailure(
              operations.value()[i]->Wait(Patience()), StatusCode::kMismatch,
              {"g." + std::to_string(i), "rank 0 submitted (4,)", "rank 2 submitted (5,)"});
        }
        EXPECT_TRUE(self.BarrierAndWait("after").ok()) << "the engine continues";
      }
    });
  }
}

TEST(EngineGroups, RanksThatDisagreeAboutTheMembersGetAnError) {
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [](int rank, Rank& self) {
    std::vector<std::vector<float>> data(3, std::vector<float>(4, 1.0f));
    const std::string other = rank == 0 ? "x" : "y";
    const auto operations = TryGroup(self, "g", {"a", "b", other}, data);
    ASSERT_TRUE(operations.ok());
    for (const Pointer& operation : operations.value()) {
      ExpectFailure(operation->Wait(Patience()), StatusCode::kMismatch,
                    {"group 'g'", "its tensors (size 3)", "'x'"});
    }
    std::vector<std::string> names{"a", "b", "c"};
    if (rank == 0) names.pop_back();
    const auto sizes = TryGroup(self, "g", names, data);
    ASSERT_TRUE(sizes.ok());
    for (const Pointer& operation : sizes.value()) {
      ExpectFailure(operation->Wait(Patience()), StatusCode::kMismatch,
                    {"number of tensors in the group", "rank 0 submitted 2", "rank 1 submitted 3"});
    }
    const auto lone = [&]() -> Result<Pointer> {
      if (rank == 0) return self.TryAllreduce("lone", data[0]);
      Result<std::vector<Pointer>> group = TryGroup(self, "g", {"lone"}, data);
      SHVD_TRY(group.status());
      return group.value()[0];
    };
    ExpectFailure(FailureOf(lone()), StatusCode::kMismatch,
                  {"the group", "it alone", "it in the group 'g'"});
  });
}

TEST(EngineGroups, AGroupWithANameInFlightIsRefusedAsAWhole) {
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [](int rank, Rank& self) {
    std::vector<std::vector<float>> data(3, std::vector<float>(4, 1.0f));
    if (rank == 0) {
      const Pointer first = self.Allreduce("b", data[0]);
      const auto refused = TryGroup(self, "g", {"a", "b"}, data);
      ExpectFailure(refused.status(), StatusCode::kInvalidArgument, {"'b'", "in flight"});
      EXPECT_TRUE(self.BarrierAndWait("go").ok());
      EXPECT_TRUE(first->Wait(Patience()).ok());
    } else {
      EXPECT_TRUE(self.BarrierAndWait("go").ok());
      EXPECT_TRUE(self.Allreduce("b", data[0])->Wait(Patience()).ok());
    }
    const auto again = TryGroup(self, "g", {"a", "b"}, data);
    ASSERT_TRUE(again.ok()) << "the names are free";
    for (const Pointer& operation : again.value()) EXPECT_TRUE(operation->Wait(Patience()).ok());
    ExpectFailure(TryGroup(self, "g", {"c", "c"}, data).status(), StatusCode::kInvalidArgument,
                  {"'c'", "in flight"});
  });
}

TEST(EngineJoin, OperationsThatNeedTheDataOfJoinedRanksAreRefused) {
  OnEveryRank(InProcessMeshes(OneHost(2)), Quick(), [](int rank, Rank& self) {
    if (rank == 1) {
      std::vector<float> data(2, 1.0f);
      Request request = Of(OperationKind::kBroadcast, "root", {2});
      ExpectFailure(FailureOf(self.engine.Submit(request, BytesOf(data), BytesOf(data))),
                    StatusCode::kInvalidArgument,
                    {"broadcast 'root'", "have joined", "the data of its root"});
      EXPECT_TRUE(self.BarrierAndWait("barrier").ok());
      request.kind = OperationKind::kAlltoall;
      request.splits = {1, 1};
      ExpectFailure(FailureOf(self.engine.Submit(request, BytesOf(data), BytesOf(data))),
                    StatusCode::kInvalidArgument,
                    {"alltoall 'root'", "have joined", "data of every rank"});
    }
    Result<Pointer> join = TryJoin(self);
    ASSERT_TRUE(join.ok());
    EXPECT_TRUE(join.value()->Wait(Patience()).ok());
    std::vector<float> data(1);
    Request taken = Of(OperationKind::kAllreduce, kJoinName, {1});
    ExpectFailure(FailureOf(self.engine.Submit(taken, BytesOf(data), BytesOf(data))),
                  StatusCode::kInvalidArgument, {"reserved for join"});
  });
}

TEST(EngineJoin, BroadcastsOfARootThatHasNotJoinedAndReducescattersContinue) {
  for (const std::vector<int>& hosts : {OneHost(3), std::vector<int>{0, 1, 2}}) {
    OnEveryRank(InProcessMeshes(hosts), Quick(), [](int rank, Rank& self) {
      constexpr int64_t kCount = 30001;       // several chunks
      for (int turn = 0; turn < 3; ++turn) {  // all ranks; beside a joined rank; the same by id
        if (rank == 0 && turn > 0) break;
        std::vector<float> data(kCount, static_cast<float>(rank));
        Request request = Of(OperationKind::kBroadcast, "weights", {kCount});
        request.root = 2;
        Result<Pointer> sent = self.engine.Submit(request, BytesOf(data), BytesOf(data));
        ASSERT_TRUE(sent.ok());
        EXPECT_TRUE(sent.value()->Wait(Patience()).ok());
        EXPECT_EQ(data, std::vector<float>(kCount, 2.0f));
        std::vector<float> mine((kCount + (rank == 0 ? 2 : rank == 1 ? 1 : 0)) / 3);
        request = Of(OperationKind::kReducescatter, "parts", {kCount});
        Result<Pointer> scattered = self.engine.Submit(request, BytesOf(data), BytesOf(mine));
        ASSERT_TRUE(scattered.ok());
        EXPECT_TRUE(scattered.value()->Wait(Patience()).ok());
        EXPECT_EQ(mine, std::vector<float>(mine.size(), turn == 0 ? 6.0f : 4.0f));
      }
      Result<Pointer> join = TryJoin(self);
      ASSERT_TRUE(join.ok());
      EXPECT_TRUE(join.value()->Wait(Patience()).ok());
      EXPECT_EQ(join.value()->outcome().code(), StatusCode::kOk);
    });
  }
}

TEST(EngineJoin, AJoinReleasesAWaitingOperation) {
  for (const std::vector<int>& hosts : {OneHost(3), std::vector<int>{0, 1, 2}}) {
    OnEveryRank(InProcessMeshes(hosts), Quick(), [](int rank, Rank& self) {
      for (int turn = 0; turn < 3; ++turn) {  // requested in full, then by id
        std::vector<float> data(2, 1.0f);
        if (turn == 0) {
          EXPECT_TRUE(self.Allreduce("waiting", data)->Wait(Patience()).ok());
          continue;
        }
        if (rank > 0) {
          const Pointer waiting = self.Allreduce("waiting", data);
          EXPECT_TRUE(waiting->Wait(Patience()).ok());
          EXPECT_EQ(data[0], 2.0f);
        }
        Result<Pointer> join = TryJoin(self);
        ASSERT_TRUE(join.ok());
        EXPECT_TRUE(join.value()->Wait(Patience()).ok());
      }
    });
  }
}

TEST(EngineLabel, PrefixesFailures) {
  EngineConfig config = Quick();
  config.label = "process set 3";
  OnEveryRank(InProcessMeshes(OneHost(2)), config, [](int rank, Rank& self) {
    std::vector<float> data(rank == 0 ? 1 : 2);
    ExpectFailure(FailureOf(self.TryAllreduce("x", data)), StatusCode::kMismatch,
                  {"allreduce 'x': process set 3: ranks disagree"});
  });
}

}  // namespace
}  // namespace sparkhvd
