#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <tuple>

#include "collectives/alltoall.h"
#include "collectives/identity.h"
#include "collectives/kernels.h"
#include "collectives/ranks.h"
#include "collectives/reducescatter.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::ExpectAllOk;
using testing::OnEveryRank;
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

Status CheckReducescatter(int rank, Mesh& mesh, ArenaSteps* steps, const Reduction& reduction,
                          size_t count) {
  const int size = mesh.transport->size();
  const std::vector<Slice> slices = EvenSlices(count, size);
  const Slice own = slices[static_cast<size_t>(rank)];
  Elements source(reduction.dtype, count, static_cast<size_t>(rank % 3));
  Elements target(reduction.dtype, own.count, static_cast<size_t>(rank % 2));
  const auto contribution = [&](size_t i) {
    return testing::Contribution(reduction.dtype, reduction.op, rank, i);
  };
  for (size_t i = 0; i < count; ++i) source.Set(i, contribution(i));
  std::vector<std::byte> scratch;
  SHVD_TRY(steps != nullptr
               ? ReducescatterShm(*steps, reduction, source.data(), target.data(), slices, Soon())
               : ReducescatterRing(*mesh.transport, reduction, source.data(), target.data(), slices,
                                   scratch, Soon()));
  for (size_t i = 0; i < count; ++i) {
    EXPECT_EQ(source.Get(i), contribution(i)) << "the source changed";
  }
  for (size_t i = 0; i < own.count; ++i) {
    const double sum = testing::Expected(reduction.dtype, reduction.op, size, own.begin + i);
    const double expected = reduction.postscale * sum;
    if (target.Get(i) != expected) {
      return Status(StatusCode::kInternal,
                    std::string(Name(reduction.dtype)) + " " + Name(reduction.op) + " element " +
                        std::to_string(i) + " of " + std::to_string(own.count));
    }
  }
  return Status();
}

TEST_P(ScatterTest, ReducescatterMatchesTheOracleForEveryDTypeOperatorAndLength) {
  Run([](int rank, Mesh& mesh, ArenaSteps* steps) {
    for (const DType dtype : testing::DTypesToReduce()) {
      for (const ReduceOp op : testing::kEveryOp) {
        if (op == ReduceOp::kAverage) continue;
        for (const size_t count : {size_t{3}, size_t{997}}) {
          SHVD_TRY(CheckReducescatter(rank, mesh, steps, Reduction{dtype, op, 1.0, 1.0}, count));
        }
      }
    }
    for (const size_t count :
         {size_t{0}, size_t{1}, size_t{64}, size_t{100003}, size_t{5}, size_t{20000}}) {
      const Reduction doubled{DType::kFloat32, ReduceOp::kSum, 1.0, 2.0};
      SHVD_TRY(CheckReducescatter(rank, mesh, steps, doubled, count));
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
    std::vector<std::byte> scratch;
    const Reduction reduction{DType::kFloat64, ReduceOp::kAverage, 3.0, 0.5};
    SHVD_TRY(steps != nullptr
                 ? ReducescatterShm(*steps, reduction, source.data(), target.data(), slices, Soon())
                 : ReducescatterRing(*mesh.transport, reduction, source.data(), target.data(),
                                     slices, scratch, Soon()));
    for (size_t i = 0; i < slices[static_cast<size_t>(rank)].count; ++i) {
      EXPECT_NEAR(target.Get(i), 1.5 * (size() + 1) / 2, 1e-12);
    }
    return Status();
  });
}

TEST_P(ScatterTest, AlltoallDeliversPartsInTheOrderOfTheSenders) {
  Run([this](int rank, Mesh& mesh, ArenaSteps* steps) {
    const auto parts = static_cast<size_t>(size());
    const auto me = static_cast<size_t>(rank);
    // Empty, unequal parts including empty ones, and more than an arena's slot.
    for (const size_t unit : {size_t{0}, size_t{1}, size_t{997}, size_t{100003}}) {
      std::vector<size_t> lengths(parts * parts);
      for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = unit * ((i * i + i / 3) % 4);
      const auto own = lengths.begin() + static_cast<ptrdiff_t>(me * parts);
      const std::vector<int64_t> splits(own, own + static_cast<ptrdiff_t>(parts));
      const auto value = [](size_t sender, size_t receiver, size_t i) {
        return static_cast<std::byte>(sender * 31 + receiver * 7 + i);
      };
      std::vector<std::byte> source;
      std::vector<std::byte> expected;
      for (size_t other = 0; other < parts; ++other) {
        for (size_t i = 0; i < lengths[me * parts + other]; ++i) {
          source.push_back(value(me, other, i));
        }
        for (size_t i = 0; i < lengths[other * parts + me]; ++i) {
          expected.push_back(value(other, me, i));
        }
      }
      const auto exchanged = steps != nullptr
                                 ? ExchangeSections(*steps, SectionsOf(splits), Soon())
                                 : ExchangeSections(*mesh.transport, SectionsOf(splits), Soon());
      SHVD_TRY(exchanged.status());
      std::vector<size_t> from_all;
      for (const Section& section : exchanged.value()) from_all.push_back(section.count);
      std::vector<std::byte> target(expected.size());
      const ConstBytes sent(source.data(), source.size());
      const Bytes received(target.data(), target.size());
      SHVD_TRY(steps != nullptr
                   ? AlltoallShm(*steps, sent, received, exchanged.value(), Soon())
                   : AlltoallPairwise(*mesh.transport, sent, {splits.begin(), splits.end()},
                                      received, from_all, Soon()));
      EXPECT_TRUE(target == expected) << "unit " << unit;
    }
    return Status();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, ScatterTest,
                         ::testing::Combine(::testing::ValuesIn(testing::SizesToTry()),
                                            ::testing::Bool()),
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
