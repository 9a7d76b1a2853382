#include "scheduler/affinity.h"

#include <sched.h>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

constexpr int kMissingCore = CPU_SETSIZE - 1;

cpu_set_t OwnCores() {
  cpu_set_t cores;
  EXPECT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  return cores;
}

TEST(Affinity, PinsOnlyOneThread) {
  const cpu_set_t before = OwnCores();
  const int core = ::sched_getcpu();
  EXPECT_TRUE(CheckProcessorCore(core).ok());
  std::thread([core] {
    EXPECT_TRUE(PinThisThread(core).ok());
    const cpu_set_t pinned = OwnCores();
    EXPECT_EQ(CPU_COUNT(&pinned), 1);
    EXPECT_TRUE(CPU_ISSET(static_cast<size_t>(core), &pinned));
  }).join();
  const cpu_set_t after = OwnCores();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(Affinity, NamesAMissingCore) {
  for (const int core : {-1, kMissingCore, CPU_SETSIZE, 1 << 30}) {
    const Status status = CheckProcessorCore(core);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("to core " + std::to_string(core)), std::string::npos)
        << status.message();
  }
}

TEST(Affinity, AnEngineThatCannotBePinnedFailsItsOperationsAndItsPeers) {
  EngineConfig config = Quick();
  config.processor_core = kMissingCore;
  OnEveryRank(InProcessMeshes(OneHost(2)), config, [](int, Rank& self) {
    std::vector<float> data(4);
    ExpectFailure(FailureOf(self.TryAllreduce("x", data)), StatusCode::kInvalidArgument,
                  {"cannot be pinned to core " + std::to_string(kMissingCore)});
  });
}

}  // namespace
}  // namespace sparkhvd
