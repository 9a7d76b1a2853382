#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "collectives/allgather.h"
#include "collectives/allgather_hierarchical.h"
#include "collectives/allreduce_hierarchical.h"
#include "collectives/allreduce_links.h"
#include "collectives/allreduce_shm.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/broadcast_hierarchical.h"
#include "collectives/hierarchy.h"
#include "collectives/kernels.h"
#include "collectives/ranks.h"
#include "collectives/reducescatter.h"
#include "collectives/select.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::ExpectAllOk;
using testing::OnEveryRank;
using testing::Repeat;
using testing::SameBytes;
using testing::Soon;

enum class Way { kLinks, kRing, kDoubling, kHalving, kArena, kHierarchical, kInParts };

struct Layout {
  std::string name;
  std::vector<int> hosts;  // indexed by rank
  Way way;

  int size() const { return static_cast<int>(hosts.size()); }
};

void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

// Makes one rank's calls with the algorithms of the layout.
class Caller {
 public:
  Caller(const Layout& layout, Mesh& mesh)
      : way_(layout.way),
        transport_(*mesh.transport),
        hierarchy_(mesh.memory_groups, mesh.transport->rank()) {
    if (mesh.arena) steps_.emplace(*mesh.arena);
  }

  Status Allreduce(const Reduction& reduction, Elements& source, Elements& target) {
    std::vector<std::byte> scratch;
    switch (way_) {
      case Way::kArena:
        return AllreduceShm(*steps_, reduction, source.data(), target.data(), source.count(),
                            Soon());
      case Way::kLinks:
        return AllreduceLinks(transport_, reduction, source.data(), target.data(), source.count(),
                              scratch, Soon());
      case Way::kRing:
        return InPlace(AllreduceRingInPlace, reduction, source, target);
      case Way::kDoubling:
        return InPlace(AllreduceDoublingInPlace, reduction, source, target);
      case Way::kHalving:
        return InPlace(AllreduceHalvingInPlace, reduction, source, target);
      case Way::kHierarchical:
        return AllreduceHierarchical(transport_, steps(), hierarchy_, reduction, source.data(),
                                     target.data(), source.count(), scratch, Soon());
      case Way::kInParts:
        return AllreduceInParts(transport_, steps(), hierarchy_, reduction, source.data(),
                                target.data(), source.count(), 3, scratch, Soon());
    }
    return Status(StatusCode::kInternal, "no way");
  }

  Status Allgather(ConstBytes source, const std::vector<size_t>& lengths, Bytes target) {
    switch (way_) {
      case Way::kArena:
        return AllgatherShm(*steps_, source, lengths, target, Soon());
      case Way::kLinks:
        return AllgatherLinks(transport_, source, lengths, target, Soon());
      case Way::kDoubling:
        return AllgatherDoubling(transport_, source, lengths, target, Soon());
      case Way::kRing:
      case Way::kHalving:
        return AllgatherRing(transport_, source, lengths, target, Soon());
      case Way::kHierarchical:
      case Way::kInParts:
        return AllgatherHierarchical(transport_, steps(), hierarchy_, source, lengths, target,
                                     Soon());
    }
    return Status(StatusCode::kInternal, "no way");
  }

  Status Broadcast(int root, Bytes data) {
    constexpr size_t kPieceBytes = 10007;
    switch (way_) {
      case Way::kArena:
        return BroadcastShm(*steps_, root, data.data(), data, Soon());
      case Way::kLinks:
        return BroadcastLinks(transport_, SelectBroadcast(transport_.size(), data.size()), root,
                              data.data(), data, Soon());
      case Way::kRing:
        return BroadcastLinks(transport_, {true, kPieceBytes}, root, data.data(), data, Soon());
      case Way::kDoubling:
      case Way::kHalving:
        return BroadcastLinks(transport_, {false, kPieceBytes}, root, data.data(), data, Soon());
      case Way::kHierarchical:
      case Way::kInParts:
        return BroadcastHierarchical(transport_, steps(), hierarchy_, root, data.data(), data,
                                     Soon());
    }
    return Status(StatusCode::kInternal, "no way");
  }

 private:
  ArenaSteps* steps() { return steps_ ? &*steps_ : nullptr; }

  template <typename Algorithm>
  Status InPlace(Algorithm algorithm, const Reduction& reduction, Elements& source,
                 Elements& target) {
    std::vector<std::byte> scratch;
    CopyPrescaled(reduction, target.data(), source.data(), source.count());
    return algorithm(transport_, reduction, transport_.size(), target.data(), source.count(),
                     scratch, Soon());
  }

  const Way way_;
  Transport& transport_;
  std::optional<ArenaSteps> steps_;
  const Hierarchy hierarchy_;
};

// Compares with the oracle, out of place and in place.
Status CheckAllreduce(int rank, int size, Caller& caller, DType dtype, ReduceOp op, size_t count) {
  Elements source(dtype, count, static_cast<size_t>(rank % 3));
  Elements target(dtype, count, static_cast<size_t>(rank % 2));
  const auto contribution = [&](size_t i) { return testing::Contribution(dtype, op, rank, i); };
  const auto expected = [&](size_t i) { return testing::Expected(dtype, op, size, i); };
  source.Fill(contribution);
  const Reduction reduction{dtype, op, 1.0, 1.0};
  SHVD_TRY(caller.Allreduce(reduction, source, target));
  EXPECT_EQ(source.FirstOtherThan(contribution), std::nullopt) << "the source changed";
  SHVD_TRY(caller.Allreduce(reduction, source, source));
  for (Elements* result : {&target, &source}) {
    if (const std::optional<size_t> wrong = result->FirstOtherThan(expected)) {
      return Status(StatusCode::kInternal, std::string(Name(dtype)) + " " + Name(op) + " " +
                                               std::to_string(*wrong) + " of " +
                                               std::to_string(count));
    }
  }
  return Status();
}

class AllreduceTest : public ::testing::TestWithParam<Layout> {};

TEST_P(AllreduceTest, MatchesTheOracleForEveryDTypeOperatorAndLength) {
  const Layout& layout = GetParam();
  const int size = layout.size();
  std::vector<Mesh> meshes = InProcessMeshes(layout.hosts);
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    Caller caller(layout, mesh);
    for (const size_t count : {size_t{3}, size_t{997}}) {
      for (const DType dtype : testing::DTypesToReduce()) {
        for (const ReduceOp op : testing::kEveryOp) {
          if (op == ReduceOp::kAverage) continue;
          SHVD_TRY(CheckAllreduce(rank, size, caller, dtype, op, count));
        }
      }
    }
    // Empty, less than an element per rank, several chunks of the arena, several pieces of the
    // ring, and sizes that change from one operation to the next.
    for (const size_t count :
         {size_t{0}, size_t{1}, size_t{64}, size_t{100003}, size_t{5}, size_t{20000}}) {
      SHVD_TRY(CheckAllreduce(rank, size, caller, DType::kFloat32, ReduceOp::kSum, count));
      SHVD_TRY(CheckAllreduce(rank, size, caller, DType::kInt8, ReduceOp::kMax, count));
    }
    return Status();
  }));
}

TEST_P(AllreduceTest, AppliesScalesAndAverages) {
  const Layout& layout = GetParam();
  const int size = layout.size();
  std::vector<Mesh> meshes = InProcessMeshes(layout.hosts);
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    Caller caller(layout, mesh);
    for (const size_t count : {size_t{10}, size_t{30011}}) {
      Elements data(DType::kFloat64, count);
      data.Fill([&](size_t) { return rank + 1.0; });
      const Reduction reduction{DType::kFloat64, ReduceOp::kAverage, 3.0, 0.5};
      SHVD_TRY(caller.Allreduce(reduction, data, data));
      double furthest = 0;
      for (size_t i = 0; i < count; ++i) {
        furthest = std::max(furthest, std::fabs(data.Get(i) - 1.5 * (size + 1) / 2));
      }
      EXPECT_LE(furthest, 1e-12);
      Elements whole(DType::kInt32, count);
      whole.Fill([&](size_t) { return -rank; });
      const Reduction average{DType::kInt32, ReduceOp::kAverage, 1.0, 1.0};
      SHVD_TRY(caller.Allreduce(average, whole, whole));
      EXPECT_EQ(whole.FirstOtherThan([&](size_t) { return -(size * (size - 1) / 2 / size); }),
                std::nullopt);
    }
    return Status();
  }));
}

TEST_P(AllreduceTest, GathersRaggedContributionsAndBroadcastsFromEveryRoot) {
  const Layout& layout = GetParam();
  const int size = layout.size();
  std::vector<Mesh> meshes = InProcessMeshes(layout.hosts);
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    Caller caller(layout, mesh);
    for (const size_t unit : {size_t{1}, size_t{0}, size_t{30011}}) {
      std::vector<size_t> lengths;
      for (int r = 0; r < size; ++r) lengths.push_back(unit * static_cast<size_t>((r + 1) % 3));
      const std::vector<std::byte> own(lengths[static_cast<size_t>(rank)], std::byte(rank + 1));
      std::vector<std::byte> all(std::accumulate(lengths.begin(), lengths.end(), size_t{0}));
      const ConstBytes source(own.data(), own.size());
      const Bytes target(all.data(), all.size());
      SHVD_TRY(caller.Allgather(source, lengths, target));
      std::vector<std::byte> expected;
      for (int r = 0; r < size; ++r) {
        expected.insert(expected.end(), lengths[static_cast<size_t>(r)], std::byte(r + 1));
      }
      EXPECT_TRUE(SameBytes(target, ConstBytes(expected.data(), expected.size())));
      std::vector<std::byte> sent(unit * 23 + 1);
      constexpr size_t kPeriod = 7 * 251;
      for (size_t i = 0; i < std::min(sent.size(), kPeriod); ++i) {
        sent[i] = std::byte((i / 7 + i * 3) % 251);
      }
      Repeat(sent.data(), kPeriod, sent.size());
      std::vector<std::byte> data(sent.size());
      for (int root = 0; root < size; ++root) {
        sent.front() = sent.back() = std::byte(root + 1);
        const ConstBytes content(sent.data(), sent.size());
        if (rank == root) {
          data = sent;
        } else {
          std::memset(data.data(), 255, data.size());
        }
        SHVD_TRY(caller.Broadcast(root, Bytes(data.data(), data.size())));
        EXPECT_TRUE(SameBytes(ConstBytes(data.data(), data.size()), content)) << "root " << root;
      }
    }
    return Status();
  }));
}

TEST_P(AllreduceTest, GivesAllRanksTheSameBits) {
  const Layout& layout = GetParam();
  constexpr size_t kCount = 5003;
  std::vector<Mesh> meshes = InProcessMeshes(layout.hosts);
  std::vector<std::vector<float>> results(layout.hosts.size(), std::vector<float>(kCount));
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    Caller caller(layout, mesh);
    Elements data(DType::kFloat32, kCount);
    for (size_t i = 0; i < kCount; ++i) {
      data.Set(i, 1.0 / static_cast<double>(i * 7 + static_cast<size_t>(rank) * 3 + 1));
    }
    for (size_t i = 0; i < kCount; i += 97) {  // several ranks have NaNs with different payloads
      const uint32_t nan = 0x7fc00000u + static_cast<uint32_t>(rank + 1);
      if (rank % 3 != 1) std::memcpy(data.data() + i * sizeof(nan), &nan, sizeof(nan));
    }
    SHVD_TRY(
        caller.Allreduce(Reduction{DType::kFloat32, ReduceOp::kAverage, 0.3, 1.7}, data, data));
    std::memcpy(results[static_cast<size_t>(rank)].data(), data.data(), data.size_bytes());
    return Status();
  }));
  for (const std::vector<float>& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results.front().data(), kCount * sizeof(float)), 0);
  }
}

std::vector<Layout> Layouts() {
  std::vector<Layout> layouts;
  for (const int size : testing::SizesToTry()) {
    const std::vector<int> hosts(static_cast<size_t>(size), 0);
    layouts.push_back({std::to_string(size) + "ranksLinks", hosts, Way::kLinks});
    layouts.push_back({std::to_string(size) + "ranksRing", hosts, Way::kRing});
    layouts.push_back({std::to_string(size) + "ranksDoubling", hosts, Way::kDoubling});
    layouts.push_back({std::to_string(size) + "ranksHalving", hosts, Way::kHalving});
    if (size > 1) layouts.push_back({std::to_string(size) + "ranksArena", hosts, Way::kArena});
  }
  std::vector<std::vector<int>> several = {
      {0, 0, 1}, {0, 1, 1, 1, 0}, {0, 0, 0, 1, 1, 1, 2, 3}, {0, 0, 1, 1, 2, 2, 3, 3, 4, 4}};
  if (Thorough()) {
    several.insert(several.end(),
                   {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2, 1, 2, 0, 2}, {0, 0, 0, 0, 1, 1, 1, 1}});
  }
  for (const std::vector<int>& hosts : several) {
    std::string name = "ranksOnHosts";
    for (const int host : hosts) name += std::to_string(host);
    layouts.push_back({std::to_string(hosts.size()) + name, hosts, Way::kHierarchical});
    layouts.push_back({std::to_string(hosts.size()) + name + "InParts", hosts, Way::kInParts});
  }
  return layouts;
}

INSTANTIATE_TEST_SUITE_P(Layouts, AllreduceTest, ::testing::ValuesIn(Layouts()),
                         [](const auto& chosen) { return chosen.param.name; });

TEST(Collectives, BarrierWaitsForAllRanks) {
  for (const int size : testing::SizesToTry()) {
    std::vector<Mesh> meshes = InProcessMeshes(std::vector<int>(static_cast<size_t>(size), 0));
    std::atomic<int> came{0};
    ExpectAllOk(OnEveryRank(meshes, [&](int, Mesh& mesh) {
      for (int round = 1; round <= 20; ++round) {
        ++came;
        SHVD_TRY(Barrier(*mesh.transport, Soon()));
        EXPECT_GE(came.load(), round * size);
      }
      return Status();
    }));
  }
}

TEST(Collectives, MissingRankFailsTheOthersWithItsRankAndTheStep) {
  for (const bool arena : {false, true}) {
    std::vector<Mesh> meshes = InProcessMeshes({0, 0, 0});
    const auto statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
      if (rank == 2) return Status();
      std::vector<float> data(70000);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      const Deadline deadline = Deadline::AfterSeconds(0.2);
      if (arena) {
        ArenaSteps steps(*mesh.arena);
        return AllreduceShm(steps, Reduction{}, bytes, bytes, data.size(), deadline);
      }
      std::vector<std::byte> scratch;
      return AllreduceRingInPlace(*mesh.transport, Reduction{}, 3, bytes, data.size(), scratch,
                                  deadline);
    });
    EXPECT_EQ(statuses[0].code(), StatusCode::kTimeout);
    EXPECT_NE(statuses[0].message().find("2"), std::string::npos) << statuses[0].message();
    EXPECT_NE(statuses[0].message().find(arena ? "element 0 of 70000" : "ring reduce step 0"),
              std::string::npos)
        << statuses[0].message();
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST(Collectives, MissingRankFailsBothHostsInAHierarchy) {
  std::vector<Mesh> meshes = InProcessMeshes({0, 0, 1, 1});
  const auto statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    if (rank == 3) return Status();
    std::vector<float> data(70000);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    ArenaSteps steps(*mesh.arena);
    std::vector<std::byte> scratch;
    return AllreduceHierarchical(*mesh.transport, &steps, Hierarchy(mesh.memory_groups, rank),
                                 Reduction{}, bytes, bytes, data.size(), scratch,
                                 Deadline::AfterSeconds(1));
  });
  for (const int rank : {0, 1, 2}) {
    const Status& status = statuses[static_cast<size_t>(rank)];
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << rank << ": " << status.message();
    EXPECT_NE(
        status.message().find(rank == 2 ? "inside the host: arena step 1 was not reached by rank 3"
                                        : "between hosts: doubling distance 1"),
        std::string::npos)
        << status.message();
  }
  EXPECT_NE(statuses[1].message().find("from rank 3"), std::string::npos) << statuses[1].message();
}

TEST(Collectives, AnAllreduceInPartsGivesTheSameBitsWithAndWithoutAThreadForIt) {
  constexpr size_t kCount = 5000;
  const std::vector<int> hosts = {0, 0, 0, 1, 1, 1};
  std::vector<std::vector<float>> results;
  for (const bool together : {true, false}) {
    std::vector<Mesh> meshes = InProcessMeshes(hosts);
    std::vector<std::vector<float>> of_ranks(hosts.size(), std::vector<float>(kCount));
    ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
      std::vector<float>& data = of_ranks[static_cast<size_t>(rank)];
      for (size_t i = 0; i < kCount; ++i) {
        data[i] = 1.0f / (3.0f + static_cast<float>(i) + static_cast<float>(rank));
      }
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      ArenaSteps steps(*mesh.arena);
      const Hierarchy hierarchy(mesh.memory_groups, rank);
      const Reduction average{DType::kFloat32, ReduceOp::kAverage};
      std::vector<std::byte> scratch;
      const auto reduce = [&](size_t begin, size_t count, int parts) {
        std::byte* part = bytes + begin * sizeof(float);
        return AllreduceInParts(*mesh.transport, &steps, hierarchy, average, part, part, count,
                                parts, scratch, Soon());
      };
      if (together) return reduce(0, kCount, 4);
      for (const Slice& part : EvenSlices(kCount, 4, kCacheLine / sizeof(float))) {
        SHVD_TRY(reduce(part.begin, part.count, 1));
      }
      return Status();
    }));
    results.insert(results.end(), of_ranks.begin(), of_ranks.end());
  }
  for (const std::vector<float>& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results.front().data(), kCount * sizeof(float)), 0);
  }
}

// Reduces `count` zeros of a rank in parts.
Status ReduceZerosInParts(Mesh& mesh, size_t count, int parts, Deadline deadline) {
  std::vector<float> data(count);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  ArenaSteps steps(*mesh.arena);
  std::vector<std::byte> scratch;
  return AllreduceInParts(*mesh.transport, &steps,
                          Hierarchy(mesh.memory_groups, mesh.transport->rank()), Reduction{}, bytes,
                          bytes, count, parts, scratch, deadline);
}

// Rank 0's exchange of the first part waits for rank 2, which never comes. The second part fails
// inside the host, because rank 1 gives up.
TEST(Collectives, AFailureInsideTheHostEndsTheExchangeOfAnotherPart) {
  constexpr size_t kCount = 4096;
  std::vector<Mesh> meshes = InProcessMeshes({0, 0, 1, 1});
  const auto statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    if (rank > 1) return Status();
    if (rank == 0) return ReduceZerosInParts(mesh, kCount, 2, Deadline::Never());
    std::vector<float> data(kCount), lane(kCount);
    ArenaSteps steps(*mesh.arena);
    SHVD_TRY(ReducescatterShm(steps, Reduction{}, reinterpret_cast<std::byte*>(data.data()),
                              reinterpret_cast<std::byte*>(lane.data()),
                              EvenSlices(kCount / 2, 2, 16), Soon()));
    mesh.arena->Abort(Status(StatusCode::kAborted, "rank 1 has had enough"));
    return Status();
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kAborted);
  for (const char* words : {"inside the host", "rank 1 has had enough"}) {
    EXPECT_NE(statuses[0].message().find(words), std::string::npos) << statuses[0].message();
  }
}

TEST(Collectives, AFailureBetweenHostsEndsAnAllreduceInParts) {
  std::vector<Mesh> meshes = InProcessMeshes({0, 0, 1, 1});
  const auto statuses = OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    return rank > 1 ? Status() : ReduceZerosInParts(mesh, 4096, 4, Deadline::AfterSeconds(1));
  });
  for (const int rank : {0, 1}) {
    const Status& status = statuses[static_cast<size_t>(rank)];
    EXPECT_EQ(status.code(), StatusCode::kTimeout);
    for (const std::string& words :
         {std::string("between hosts"), "from rank " + std::to_string(rank + 2)}) {
      EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
    }
  }
}

TEST(Slices, CoverEverythingInOrderAndDifferByOneGrain) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{64}, size_t{997}}) {
    for (int parts = 1; parts <= 9; ++parts) {
      for (const size_t grain : {size_t{1}, size_t{16}}) {
        size_t next = 0;
        for (int index = 0; index < parts; ++index) {
          const Slice slice = SliceOf(count, parts, index, grain);
          EXPECT_EQ(slice.begin, next);
          const size_t even = count / static_cast<size_t>(parts);
          EXPECT_LE(slice.count, even + 2 * grain);
          next = slice.begin + slice.count;
        }
        EXPECT_EQ(next, count);
      }
    }
  }
}

TEST(Select, UsesTheArenaOnlyWhenItHoldsTheWholeJob) {
  EXPECT_EQ(Select(Topology{1, 1}), Algorithm::kLocal);
  EXPECT_EQ(Select(Topology{4, 1}), Algorithm::kArena);
  EXPECT_EQ(Select(Topology{4, 2}), Algorithm::kTransport);
  EXPECT_EQ(Select(Topology{4, 4}), Algorithm::kTransport);
}

TEST(Select, LinksDoubleSmallDataHalveMoreAndCarryTheMostAroundARing) {
  for (const int size : {4, 8, 64, 1024}) {
    EXPECT_EQ(SelectForLinks(size, 4096), LinkAlgorithm::kDoubling) << size;
    EXPECT_EQ(SelectForLinks(size, size_t{1} << 32), LinkAlgorithm::kRing) << size;
  }
  EXPECT_EQ(SelectForLinks(128, 1 << 20), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(2, 100), LinkAlgorithm::kDoubling);
  EXPECT_EQ(SelectForLinks(2, 100 << 20), LinkAlgorithm::kRing);
  // Halving sends extra bytes if the size is not a power of two, so a ring is faster earlier.
  EXPECT_EQ(SelectForLinks(8, 1 << 20), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(9, 1 << 20), LinkAlgorithm::kRing);
  // A ring needs slices of several pieces, so that one arrives while another is combined.
  EXPECT_EQ(SelectForLinks(64, 4 << 20, LinkCosts{30e-6, 2.56e-9}), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(64, 64 << 20, LinkCosts{30e-6, 2.56e-9}), LinkAlgorithm::kRing);
}

TEST(Select, AReducescatterOfLongDataGoesAroundARingAndOthersAreHalved) {
  for (const int size : {4, 8, 64, 1024}) {
    EXPECT_TRUE(ScattersByHalving(size, 4096)) << size;
    EXPECT_FALSE(ScattersByHalving(size, size_t{1} << 32)) << size;
  }
  EXPECT_TRUE(ScattersByHalving(128, 16 << 20));
  EXPECT_TRUE(ScattersByHalving(9, 1 << 17));
  EXPECT_FALSE(ScattersByHalving(9, 1 << 20)) << "two ranks would send all of their data";
  // One round either way.
  EXPECT_FALSE(ScattersByHalving(1, 4096));
  EXPECT_FALSE(ScattersByHalving(2, 4096));
  EXPECT_FALSE(ScattersByHalving(3, 4096)) << "three rounds instead of two";
}

TEST(Select, ShortPartsOfAnAlltoallAmongManyRanksAreRelayed) {
  for (const int size : {1, 2, 16, 64}) EXPECT_FALSE(MostBytesToRelay(size)) << size;
  for (const int size : {128, 1024, 4096}) {
    ASSERT_TRUE(MostBytesToRelay(size)) << size;
    EXPECT_GT(*MostBytesToRelay(size), 256u) << size;
    EXPECT_LT(*MostBytesToRelay(size), 1024u) << size;
  }
}

TEST(Select, ByTheCostsOfTheLinks) {
  const LinkCosts slow{30e-6, 80e-9}, fast{30e-6, 0.08e-9}, near{3e-6, 0.8e-9};
  EXPECT_EQ(SelectForLinks(8, 65536), LinkAlgorithm::kDoubling);
  EXPECT_EQ(SelectForLinks(8, 65536, slow), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(8, 8 << 20, slow), LinkAlgorithm::kRing) << "its latency hardly counts";
  EXPECT_EQ(SelectForLinks(8, 65536, near), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(8, 1 << 20, fast), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(8, 1 << 18), LinkAlgorithm::kHalving);
  EXPECT_EQ(SelectForLinks(8, 1 << 18, fast), LinkAlgorithm::kDoubling);
  EXPECT_FALSE(SelectBroadcast(32, 1 << 18).chain);
  EXPECT_TRUE(SelectBroadcast(32, 1 << 18, slow).chain);
  EXPECT_LT(SelectBroadcast(8, 8 << 20, slow).piece_bytes, SelectBroadcast(8, 8 << 20).piece_bytes);
  EXPECT_TRUE(GathersByDoubling(8, 65536, fast));
  EXPECT_FALSE(GathersByDoubling(8, 65536, slow));
  EXPECT_TRUE(MostBytesToRelay(16, near));
  EXPECT_LT(*MostBytesToRelay(128, slow), 8u);
  EXPECT_EQ(MostBytesToRelay(128, LinkCosts{30e-6, 0}), 1024u);
}

TEST(Select, AnAllreduceHasAsManyPartsAsHideTheWorkInsideTheHosts) {
  constexpr size_t kMiB = size_t{1} << 20;
  EXPECT_EQ(PartsToOverlap(2, 2, 256 << 10), 1) << "handing over would take longer";
  EXPECT_EQ(PartsToOverlap(2, 8, 64 * kMiB), 8);
  EXPECT_LT(PartsToOverlap(2, 8, 16 * kMiB), PartsToOverlap(2, 8, 64 * kMiB));
  EXPECT_EQ(PartsToOverlap(2, 8, 4 * kMiB, LinkCosts{30e-3, 0.32e-9}), 1) << "long latency";
  EXPECT_LE(PartsToOverlap(128, 8, size_t{1} << 40), 16);
}

TEST(Select, IsHierarchicalIfSomeRanksShareMemoryUnlessTurnedOff) {
  EXPECT_EQ(Select(Topology{1, 1}, true), Algorithm::kLocal);
  EXPECT_EQ(Select(Topology{4, 1}, true), Algorithm::kArena);
  EXPECT_EQ(Select(Topology{4, 2}, true), Algorithm::kHierarchical);
  EXPECT_EQ(Select(Topology{4, 3}, true), Algorithm::kHierarchical);
  EXPECT_EQ(Select(Topology{4, 4}, true), Algorithm::kTransport) << "no ranks share memory";
  EXPECT_EQ(Select(Topology{4, 2}, false), Algorithm::kTransport);
}

}  // namespace
}  // namespace sparkhvd
