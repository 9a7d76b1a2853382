// The contract that every Arena must meet.
#include "transport/arena.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "base/leak_check.h"
#include "transport/arena_file.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

std::vector<Mesh> ArenaInProcess(int size) {
  return InProcessMeshes(std::vector<int>(static_cast<size_t>(size), 0), true, 10'000);
}
std::vector<Mesh> Memfd(int size) { return Connect(size); }

class ArenaContract : public testing::TestWithParam<MeshKind> {
 protected:
  std::vector<Mesh> Make(int size) const {
    auto meshes = GetParam().make(size);
    for (const Mesh& mesh : meshes) EXPECT_NE(mesh.arena, nullptr);
    return meshes;
  }
};

TEST(ArenaReservation, SucceedsWhileSignalsArrive) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  struct sigaction previous{};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &previous), 0);
  std::atomic<bool> ended{false};
  std::thread sender([&ended, receiver = ::pthread_self()] {
    while (!ended) (void)::pthread_kill(receiver, SIGUSR1);
  });
  const auto file = CreateArenaFile(size_t{64} << 20);
  ended = true;
  sender.join();
  (void)::sigaction(SIGUSR1, &previous, nullptr);
  EXPECT_TRUE(file.ok()) << file.status().message();
}

TEST_P(ArenaContract, HasARegionPerMemberThatBeginsInTheMiddleOfAPage) {
  auto meshes = Make(3);
  for (int rank = 0; rank < 3; ++rank) {
    Arena& arena = *meshes[static_cast<size_t>(rank)].arena;
    EXPECT_EQ(arena.member(), rank);
    EXPECT_EQ(arena.count(), 3);
    EXPECT_EQ(arena.ranks(), (std::vector<int>{0, 1, 2}));
    for (int member = 0; member < 3; ++member) {
      const Bytes region = arena.Region(member);
      EXPECT_EQ(region.size(), 12288u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(region.data()) % 4096, 2048u);
      if (member > 0) {
        EXPECT_EQ(region.data(), arena.Region(member - 1).end());
      }
    }
  }
}

TEST_P(ArenaContract, ShowsTheWritesOfEveryMemberBeforeItsArrival) {
  for (const int size : {2, 3, 4, 8}) {
    auto meshes = Make(size);
    ForEachRank(size, [&](int rank) {
      Arena& arena = *meshes[static_cast<size_t>(rank)].arena;
      for (int round = 0; round < 100; ++round) {
        const Bytes own = arena.Region(arena.member());
        std::memset(own.data(), rank * 16 + round % 16, own.size());
        Status status = arena.AwaitAll(arena.Arrive(), Late());
        ASSERT_TRUE(status.ok()) << status.message();
        for (int member = 0; member < size; ++member) {
          const auto expected = static_cast<std::byte>(member * 16 + round % 16);
          const Bytes other = arena.Region(member);
          ASSERT_EQ(other[0], expected);
          ASSERT_EQ(other[other.size() - 1], expected);
        }
        status = arena.AwaitAll(arena.Arrive(), Late());
        ASSERT_TRUE(status.ok()) << status.message();
      }
    });
  }
}

TEST_P(ArenaContract, AwaitsOneMemberWithoutTheOthers) {
  auto meshes = Make(3);
  EXPECT_EQ(meshes[1].arena->Arrive(), 1u);
  EXPECT_TRUE(meshes[0].arena->Await(1, 1, Soon()).ok());
  EXPECT_EQ(meshes[0].arena->Await(2, 1, Soon()).code(), StatusCode::kTimeout);
  EXPECT_EQ(meshes[0].arena->Await(3, 1, Soon()).message(), "the arena has members 0 to 2, not 3");
}

TEST_P(ArenaContract, NamesTheRanksThatNeverArrive) {
  auto meshes = Make(4);
  (void)meshes[2].arena->Arrive();
  const uint64_t step = meshes[0].arena->Arrive();
  const Status status = meshes[0].arena->AwaitAll(step, Soon());
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "arena step 1 was not reached by rank 1, rank 3 when the deadline passed");
}

TEST_P(ArenaContract, AbortWakesTheWaitersOfAllMembersWithTheReason) {
  auto meshes = Make(3);
  std::vector<std::future<Status>> waiters;
  for (Mesh& mesh : meshes) {
    waiters.push_back(std::async(std::launch::async, [&mesh] {
      return mesh.arena->AwaitAll(mesh.arena->Arrive() + 1, Late());
    }));
  }
  meshes[1].arena->Abort(Status(StatusCode::kMismatch, "shapes differ"));
  meshes[2].arena->Abort(Status(StatusCode::kAborted, "too late to matter"));
  EXPECT_EQ(waiters[1].get().message(), "shapes differ");
  for (const size_t rank : {0, 2}) {
    const Status status = waiters[rank].get();
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_EQ(status.message(), "rank 1 aborted: shapes differ");
  }
  EXPECT_EQ(meshes[0].arena->AwaitAll(2, Late()).code(), StatusCode::kMismatch);
  EXPECT_TRUE(meshes[0].arena->AwaitAll(1, Late()).ok()) << "all members have reached the step";
}

TEST_P(ArenaContract, KeepsTheStartOfAReasonThatIsVeryLong) {
  auto meshes = Make(2);
  meshes[0].arena->Abort(Status(StatusCode::kAborted, std::string(5000, 'w')));
  EXPECT_EQ(meshes[1].arena->AwaitAll(1, Late()).message(),
            "rank 0 aborted: " + std::string(1024, 'w'));
}

TEST_P(ArenaContract, DetectsAMemberThatLeaves) {
  auto meshes = Make(3);
  auto waiter =
      std::async(std::launch::async, [&] { return meshes[0].arena->AwaitAll(1, Late()); });
  meshes[2].arena.reset();
  (void)meshes[0].arena->Arrive();
  const Status status = waiter.get();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_EQ(status.message(), "lost rank 2: it left the job");
}

TEST_P(ArenaContract, IgnoresAMemberThatLeftAfterItsLastStep) {
  auto meshes = Make(2);
  (void)meshes[1].arena->Arrive();
  meshes[1].arena.reset();
  EXPECT_TRUE(meshes[0].arena->AwaitAll(meshes[0].arena->Arrive(), Late()).ok());
}

TEST_P(ArenaContract, LeavesNothingOpenOrMapped) {
  {
    auto warm_up = Make(2);
  }
  const Holdings before = HoldingsBefore();
  {
    auto meshes = Make(4);
  }
  const Holdings after = HoldingsAfter(before);
  EXPECT_TRUE(before == after) << ToText(before) << " became " << ToText(after);
}

INSTANTIATE_TEST_SUITE_P(Arenas, ArenaContract,
                         testing::Values(MeshKind{"InProcess", ArenaInProcess},
                                         MeshKind{"Memfd", Memfd}),
                         KindName);

}  // namespace
}  // namespace sparkhvd
