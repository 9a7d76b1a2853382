#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <tuple>

#include "collectives/alltoall.h"
#include "collectives/exchange.h"
#include "collectives/identity.h"
#include "collectives/kernels.h"
#include "collectives/ranks.h"
#include "collectives/reducescatter.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::ExpectAllOk;
using testing::OnEveryRank;
using testing::Repeat;
using testing::SameBytes;
using testing::Soon;

// Runs over the arena or over the links, with each number of ranks.
class ScatterTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  // Runs `body` on every rank. `steps` is null for the links.
  void Run(const std::function<Status(int rank, Mesh& mesh, ArenaSteps* steps)>& body) const {
    std::vector<Mesh> meshes = InProcessMeshes(std::vector<int>(static_cast<size_t>(size()), 0));
    const bool arena = std::get<1>(GetParam()) && size() > 1;
    ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
      std::optional<ArenaSteps> steps;
      if (arena) steps.emplace(*mesh.arena);
      return body(rank, mesh, arena ? &*steps : nullptr);
    }));
  }
};

// Over the arena, or over the links with each algorithm.
enum class Scatter { kArena, kRing, kHalving };

std::vector<Scatter> ScattersOf(const ArenaSteps* steps) {
  if (steps != nullptr) return {Scatter::kArena};
  return {Scatter::kRing, Scatter::kHalving};
}

Status Reducescatter(Scatter scatter, Mesh& mesh, ArenaSteps* steps, const Reduction& reduction,
                     Elements& source, Elements& target, const std::vector<Slice>& slices) {
  if (scatter == Scatter::kArena) {
    return ReducescatterShm(*steps, reduction, source.data(), target.data(), slices, Soon());
  }
  std::vector<std::byte> scratch;
  return (scatter == Scatter::kRing ? ReducescatterRing : ReducescatterHalving)(
      *mesh.transport, reduction, source.data(), target.data(), slices, scratch, Soon());
}

Status CheckReducescatter(Scatter scatter, Mesh& mesh, ArenaSteps* steps,
                          const Reduction& reduction, size_t count) {
  const int rank = mesh.transport->rank();
  const int size = mesh.transport->size();
  const std::vector<Slice> slices = EvenSlices(count, size);
  const Slice own = slices[static_cast<size_t>(rank)];
  Elements source(reduction.dtype, count, static_cast<size_t>(rank % 3));
  Elements target(reduction.dtype, own.count, static_cast<size_t>(rank % 2));
  const auto contribution = [&](size_t i) {
    return testing::Contribution(reduction.dtype, reduction.op, rank, i);
  };
  const auto expected = [&](size_t i) {
    return reduction.postscale *
           testing::Expected(reduction.dtype, reduction.op, size, own.begin + i);
  };
  source.Fill(contribution);
  SHVD_TRY(Reducescatter(scatter, mesh, steps, reduction, source, target, slices));
  EXPECT_EQ(source.FirstOtherThan(contribution), std::nullopt) << "the source changed";
  if (const std::optional<size_t> wrong = target.FirstOtherThan(expected)) {
    return Status(StatusCode::kInternal,
                  std::string(Name(reduction.dtype)) + " " + Name(reduction.op) + " element " +
                      std::to_string(*wrong) + " of " + std::to_string(own.count));
  }
  return Status();
}

TEST_P(ScatterTest, ReducescatterMatchesTheOracleForEveryDTypeOperatorAndLength) {
  Run([](int, Mesh& mesh, ArenaSteps* steps) {
    for (const Scatter scatter : ScattersOf(steps)) {
      const auto check = [&](const Reduction& reduction, size_t count) {
        return CheckReducescatter(scatter, mesh, steps, reduction, count);
      };
      for (const DType dtype : testing::DTypesToReduce()) {
        for (const ReduceOp op : testing::kEveryOp) {
          if (op == ReduceOp::kAverage) continue;
          for (const size_t count : {size_t{3}, size_t{997}}) {
            SHVD_TRY(check(Reduction{dtype, op, 1.0, 1.0}, count));
          }
        }
      }
      for (const size_t count :
           {size_t{0}, size_t{1}, size_t{64}, size_t{100003}, size_t{5}, size_t{20000}}) {
        SHVD_TRY(check(Reduction{DType::kFloat32, ReduceOp::kSum, 1.0, 2.0}, count));
      }
    }
    return Status();
  });
}

TEST_P(ScatterTest, ReducescatterAveragesOverTheNumberOfRanks) {
  Run([this](int rank, Mesh& mesh, ArenaSteps* steps) {
    const std::vector<Slice> slices = EvenSlices(40, size());
    Elements source(DType::kFloat64, 40);
    for (size_t i = 0; i < 40; ++i) source.Set(i, rank + 1.0);
    Elements target(DType::kFloat64, 40);
    const Reduction reduction{DType::kFloat64, ReduceOp::kAverage, 3.0, 0.5};
    for (const Scatter scatter : ScattersOf(steps)) {
      SHVD_TRY(Reducescatter(scatter, mesh, steps, reduction, source, target, slices));
      for (size_t i = 0; i < slices[static_cast<size_t>(rank)].count; ++i) {
        EXPECT_NEAR(target.Get(i), 1.5 * (size() + 1) / 2, 1e-12);
        target.Set(i, 0);
      }
    }
    return Status();
  });
}

TEST(Reducescatter, NamesTheRankThatDoesNotComeBeforeAndWithinTheRoundsOfHalving) {
  constexpr int kSize = 5;
  // Rank 0 waits for rank 1 before the rounds, and for rank 2 in the first round.
  for (const int missing : {1, 2}) {
    std::vector<Mesh> meshes = InProcessMeshes({0, 1, 2, 3, 4});
    const std::vector<Status> statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
      if (rank == missing) return Status();
      const std::vector<float> source(100);
      std::vector<float> target(100);
      std::vector<std::byte> scratch;
      return ReducescatterHalving(
          *mesh.transport, Reduction{}, reinterpret_cast<const std::byte*>(source.data()),
          reinterpret_cast<std::byte*>(target.data()), EvenSlices(source.size(), kSize), scratch,
          Deadline::AfterSeconds(1));
    });
    const std::string where = missing == 1 ? "before the rounds: " : "halving distance 1: ";
    EXPECT_EQ(statuses[0].code(), StatusCode::kTimeout);
    EXPECT_EQ(statuses[0].message().find(where), size_t{0}) << statuses[0].message();
    EXPECT_NE(statuses[0].message().find("from rank " + std::to_string(missing)), std::string::npos)
        << statuses[0].message();
    for (int rank = 0; rank < kSize; ++rank) {
      EXPECT_EQ(statuses[static_cast<size_t>(rank)].ok(), rank == missing) << rank;
    }
  }
}

// Runs an alltoall over the arena, or over the links by each algorithm.
Status ExchangeRows(Mesh& mesh, ArenaSteps* steps, const RowsToSend& own,
                    const RowsTarget& target_of) {
  if (steps != nullptr) return AlltoallShm(*steps, own, target_of, Soon());
  std::vector<std::byte> scratch;
  for (const size_t most_bytes : {size_t{0}, size_t{5000}}) {
    SHVD_TRY(AlltoallBruck(*mesh.transport, own, target_of, most_bytes, scratch, Soon())
                 .Annotate("relaying up to " + std::to_string(most_bytes) + " bytes"));
  }
  return AlltoallDirect(*mesh.transport, own, target_of, scratch, Soon());
}

// Runs alltoalls in which rank s sends `rows_between(s, r)` rows of `row_bytes` to rank r, and
// checks what this rank receives.
Status CheckAlltoall(Mesh& mesh, ArenaSteps* steps, size_t row_bytes,
                     const std::function<size_t(size_t, size_t)>& rows_between) {
  const auto me = static_cast<size_t>(mesh.transport->rank());
  const auto ranks = static_cast<size_t>(mesh.transport->size());
  std::vector<std::byte> numbers(256);  // 0 to 255, repeated
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::byte>(i);
  const auto append = [&](std::vector<std::byte>& bytes, size_t sender, size_t receiver) {
    const size_t begin = (sender * 31 + receiver * 7) % 256;
    const size_t end = begin + rows_between(sender, receiver) * row_bytes;
    if (numbers.size() < end) {
      numbers.resize(end);
      Repeat(numbers.data(), 256, end);
    }
    const auto at = [&](size_t i) { return numbers.begin() + static_cast<std::ptrdiff_t>(i); };
    bytes.insert(bytes.end(), at(begin), at(end));
  };
  std::vector<int64_t> splits;
  std::vector<int64_t> expected_rows;
  std::vector<std::byte> source;
  std::vector<std::byte> expected;
  for (size_t other = 0; other < ranks; ++other) {
    splits.push_back(static_cast<int64_t>(rows_between(me, other)));
    expected_rows.push_back(static_cast<int64_t>(rows_between(other, me)));
    append(source, me, other);
    append(expected, other, me);
  }
  std::vector<std::vector<std::byte>> targets;  // of each algorithm
  const auto target_of = [&](const std::vector<int64_t>& rows) -> Result<Bytes> {
    EXPECT_EQ(rows, expected_rows);
    std::vector<std::byte>& target = targets.emplace_back(expected.size());
    return Bytes(target.data(), target.size());
  };
  const RowsToSend own{ConstBytes(source.data(), source.size()), splits, row_bytes};
  SHVD_TRY(ExchangeRows(mesh, steps, own, target_of));
  for (const std::vector<std::byte>& target : targets) {
    EXPECT_TRUE(SameBytes(ConstBytes(target.data(), target.size()),
                          ConstBytes(expected.data(), expected.size())));
  }
  return Status();
}

TEST_P(ScatterTest, AlltoallDeliversPartsInTheOrderOfTheSenders) {
  Run([this](int, Mesh& mesh, ArenaSteps* steps) {
    // Nothing, unequal parts including empty, short and long ones, and more than an arena's slot.
    const size_t limit = AlltoallShortBytes(size());
    for (const size_t unit : {size_t{0}, size_t{1}, limit / 3 + 1, limit, size_t{100003}}) {
      const auto unequal = [unit](size_t sender, size_t receiver) {
        const size_t i = sender * 5 + receiver;
        return unit * ((i * i + i / 3) % 4);
      };
      SHVD_TRY(CheckAlltoall(mesh, steps, 1, unequal).Annotate("unit " + std::to_string(unit)));
    }
    return CheckAlltoall(mesh, steps, 12, [](size_t sender, size_t) { return sender * 200; });
  });
}

TEST_P(ScatterTest, AlltoallOfEmptyRowsReturnsTheirNumbers) {
  Run([](int, Mesh& mesh, ArenaSteps* steps) {
    return CheckAlltoall(mesh, steps, 0,
                         [](size_t sender, size_t receiver) { return 100 * sender + receiver; });
  });
}

// Sending the numbers of rows and the rows takes several rounds, one of which has both.
TEST(Alltoall, OfManyRanksFitsIntoASmallArena) {
  std::vector<Mesh> meshes = InProcessMeshes(std::vector<int>(50, 0), true, 4096);
  ExpectAllOk(OnEveryRank(meshes, [](int, Mesh& mesh) {
    ArenaSteps steps(*mesh.arena);
    SHVD_TRY(CheckAlltoall(mesh, &steps, 40, [](size_t, size_t) { return size_t{0}; }));
    return CheckAlltoall(mesh, &steps, 40,
                         [](size_t sender, size_t receiver) { return (sender + receiver) % 9; });
  }));
}

TEST(Alltoall, FailsIfThereIsNoMemoryForTheRows) {
  const Status full(StatusCode::kIo, "no memory");
  for (const bool arena : {false, true}) {
    std::vector<Mesh> meshes = InProcessMeshes({0, 0});
    const std::vector<Status> statuses = OnEveryRank(meshes, [&](int, Mesh& mesh) {
      const std::vector<int64_t> splits{1, 2};
      const std::vector<std::byte> source(3);
      const RowsToSend own{ConstBytes(source.data(), source.size()), splits, 1};
      const auto target_of = [&](const std::vector<int64_t>&) -> Result<Bytes> { return full; };
      std::vector<std::byte> scratch;
      ArenaSteps steps(*mesh.arena);
      return arena ? AlltoallShm(steps, own, target_of, Soon())
                   : AlltoallLinks(*mesh.transport, own, target_of, scratch, Soon());
    });
    for (const Status& status : statuses) EXPECT_EQ(status.message(), "no memory");
  }
}

TEST(Alltoall, RefusesAPartThatDoesNotMatchItsNumberOfRows) {
  const std::vector<std::byte> zeros(AlltoallShortBytes(2) + 8);
  for (const bool relayed : {false, true}) {
    // Without a whole number of rows, with bytes beyond the announced 0 rows, and with too many.
    for (const size_t bytes : {size_t{7}, size_t{9}, zeros.size()}) {
      std::vector<Mesh> meshes = InProcessMeshes({0, 1});
      const std::vector<Status> statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
        std::vector<std::byte> scratch(64);
        if (rank == 1) {
          return Exchange(*mesh.transport, 0, ConstBytes(zeros.data(), bytes), 0,
                          Bytes(scratch.data(), 8), Soon());
        }
        const std::vector<int64_t> splits{0, 0};
        const auto none = [](const std::vector<int64_t>&) -> Result<Bytes> { return Bytes(); };
        const RowsToSend own{ConstBytes(), splits, 1};
        return relayed ? AlltoallBruck(*mesh.transport, own, none, AlltoallShortBytes(2), scratch,
                                       Soon())
                       : AlltoallDirect(*mesh.transport, own, none, scratch, Soon());
      });
      EXPECT_EQ(statuses[0].code(), StatusCode::kInternal);
      EXPECT_NE(statuses[0].message().find("rank 1 sent " + std::to_string(bytes) +
                                           " bytes, which do not match its number of rows"),
                std::string::npos)
          << statuses[0].message();
    }
  }
}

TEST(Alltoall, WorksOverSocketsWithSmallBuffers) {
  std::vector<Mesh> meshes = Connect(5, [](MeshOptions* options) {
    options->host_key.clear();
    options->socket_buffer_bytes = 4096;
  });
  ExpectAllOk(OnEveryRank(meshes, [](int, Mesh& mesh) {
    return CheckAlltoall(mesh, nullptr, 1, [](size_t sender, size_t receiver) {
      return (sender + 2 * receiver) % 4 * 3000;
    });
  }));
}

TEST(Alltoall, NamesTheRankThatDoesNotComeToARound) {
  std::vector<Mesh> meshes = InProcessMeshes({0, 1, 2});
  const std::vector<Status> statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    if (rank == 1) return Status();
    const std::vector<int64_t> splits{0, 0, 0};
    const auto none = [](const std::vector<int64_t>&) -> Result<Bytes> { return Bytes(); };
    std::vector<std::byte> scratch;
    return AlltoallBruck(*mesh.transport, {ConstBytes(), splits, 1}, none, 100, scratch,
                         Deadline::AfterSeconds(1));
  });
  EXPECT_EQ(statuses[2].code(), StatusCode::kTimeout);
  EXPECT_NE(statuses[2].message().find("alltoall distance 1: "), std::string::npos);
  EXPECT_NE(statuses[2].message().find("from rank 1"), std::string::npos) << statuses[2].message();
  EXPECT_FALSE(statuses[0].ok());
}

INSTANTIATE_TEST_SUITE_P(Sizes, ScatterTest,
                         ::testing::Combine(::testing::Range(1, 10), ::testing::Bool()),
                         [](const auto& chosen) {
                           return std::to_string(std::get<0>(chosen.param)) +
                                  (std::get<1>(chosen.param) ? "ranksArena" : "ranksLinks");
                         });

TEST(Identity, IsNeutralForEveryOperator) {
  for (const DType dtype : testing::kEveryDType) {
    for (const ReduceOp op : testing::kEveryOp) {
      constexpr size_t kCount = 19;
      Elements identity(dtype, kCount, 1);
      Elements values(dtype, kCount, 3);
      FillIdentity(dtype, op, identity.data(), kCount);
      for (size_t i = 0; i < kCount; ++i) values.Set(i, testing::Contribution(dtype, op, 1, i));
      Combine(dtype, op, values.data(), identity.data(), values.data(), kCount);
      for (size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(values.Get(i), testing::Contribution(dtype, op, 1, i))
            << Name(dtype) << " " << Name(op);
      }
    }
  }
}

}  // namespace
}  // namespace sparkhvd
