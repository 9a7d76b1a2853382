#include "scheduler/autotuner.h"

#include <gtest/gtest.h>

#include <set>

#include "base/thorough.h"
#include "scheduler/rank.h"
#include "transport/meshes.h"

namespace sparkhvd {
namespace {

constexpr size_t kArenaBytes = size_t{4} << 20;

AutotuneOptions Brief(std::vector<TuningSample>* samples) {
  AutotuneOptions options;
  options.warmup_samples = 2;
  options.steps_per_sample = 3;
  options.max_samples = 25;
  options.report = [samples](const TuningSample& sample) { samples->push_back(sample); };
  return options;
}

// Simulates a job in which `seconds` gives the time of a step from the settings in force.
void Simulate(Autotuner* tuner, const std::function<double(const Tunables&)>& seconds) {
  Autotuner::Time now;
  Tunables in_force;
  for (int step = 0; step < 2000; ++step) {
    if (const std::optional<Retuning> retuning = tuner->TakeRetuning()) {
      in_force = retuning->tunables;
      tuner->Begin();
    }
    tuner->Run({{"a", 600}}, now);
    tuner->Run({}, now + std::chrono::milliseconds(1));
    tuner->Run({{"b", 400}}, now + std::chrono::milliseconds(2));
    now += std::chrono::nanoseconds(static_cast<int64_t>(1e9 * seconds(in_force)));
  }
}

TEST(Autotuner, KeepsTheFastestAndReportsEverySample) {
  std::vector<TuningSample> samples;
  Autotuner tuner(Brief(&samples), TuningScope{true}, Tunables{});
  Simulate(&tuner, [](const Tunables& now) { return now.fusion_threshold == 1 << 20 ? 0.5 : 1.0; });
  ASSERT_EQ(samples.size(), 2u + 25u + 1u);
  for (size_t i = 0; i < samples.size(); ++i) {
    const TuningSample::Stage stage = i < 2    ? TuningSample::Stage::kWarmUp
                                      : i < 27 ? TuningSample::Stage::kSearch
                                               : TuningSample::Stage::kFinal;
    EXPECT_EQ(samples[i].stage, stage) << i;
    const bool fast = samples[i].tunables.fusion_threshold == 1 << 20;
    EXPECT_NEAR(samples[i].score, fast ? 2000 : 1000, 1) << i;
  }
  EXPECT_EQ(samples[0].tunables, Tunables{});
  EXPECT_EQ(samples.back().tunables.fusion_threshold, size_t{1} << 20);
}

TEST(Autotuner, ChangesOnlySettingsInItsScope) {
  std::vector<TuningSample> samples;
  AutotuneOptions options = Brief(&samples);
  Autotuner nothing(options, TuningScope{}, Tunables{});
  ASSERT_EQ(samples.size(), 1u) << "reports the final settings at once";
  EXPECT_EQ(samples[0].stage, TuningSample::Stage::kFinal);
  EXPECT_TRUE(nothing.TakeRetuning()->last);

  TuningScope scope;
  scope.arena_slot_bytes = size_t{1} << 20;
  options.max_samples = 60;
  Autotuner tuner(options, scope, Tunables{});
  Simulate(&tuner, [](const Tunables& now) {
    return 1.0 + (now.arena.small_bytes == 128 << 10 ? 0 : 1) +
           (now.arena.chunk_bytes == 1 << 20 ? 0 : 1);
  });
  EXPECT_EQ(samples.back().stage, TuningSample::Stage::kFinal);
  Tunables expected;
  expected.arena = ArenaSwitches{128 << 10, 1 << 20};
  EXPECT_EQ(samples.back().tunables, expected);
  for (const TuningSample& sample : samples) {
    EXPECT_EQ(sample.tunables.fusion_threshold, expected.fusion_threshold);
    EXPECT_TRUE(sample.tunables.hierarchical);
  }
}

TEST(Autotuner, EndsAStepEvenIfNoTensorRecurs) {
  std::vector<TuningSample> samples;
  Autotuner tuner(Brief(&samples), TuningScope{true}, Tunables{});
  Autotuner::Time now;
  tuner.Begin();
  for (int i = 0; i < 30000; ++i) {
    tuner.Run({{"unnamed." + std::to_string(i), 8}}, now += std::chrono::microseconds(8));
  }
  ASSERT_FALSE(samples.empty());
  EXPECT_NEAR(samples[0].score, 1e6, 1e3);
}

// Tests with whole jobs. Sums of integers are exact in any order.

struct Layout {
  const char* name;
  std::vector<Mesh> (*connect)();
  bool arena;
};

std::vector<Mesh> TwoRanks() { return InProcessMeshes(OneHost(2), true, kArenaBytes); }
std::vector<Mesh> FourRanks() { return InProcessMeshes(OneHost(4), true, kArenaBytes); }
std::vector<Mesh> TwoHosts() { return InProcessMeshes({0, 1, 0, 1}, true, kArenaBytes); }
std::vector<Mesh> Sockets() {
  return Connect(3, [](MeshOptions* options) { options->shared_memory = false; });
}

void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

class Autotuning : public ::testing::TestWithParam<Layout> {};

constexpr size_t kTunedTensors = 8;
constexpr size_t kLengths[] = {1, 40, 3000, 20000};  // below and above every switch point

void Step(int rank, int size, Rank& self, const std::string& set) {
  std::vector<std::vector<float>> data;
  std::vector<Pointer> operations;
  for (size_t i = 0; i < kTunedTensors; ++i) {
    data.emplace_back(kLengths[i % 4] + i, static_cast<float>(rank + 1) * static_cast<float>(i));
  }
  for (size_t i = 0; i < kTunedTensors; ++i) {
    operations.push_back(self.Allreduce(set + std::to_string(i), data[i]));
  }
  for (size_t i = 0; i < kTunedTensors; ++i) {
    ASSERT_TRUE(self.engine.Wait(*operations[i], Patience()).ok());
    const auto sum = static_cast<float>(size * (size + 1) / 2 * static_cast<int>(i));
    ASSERT_EQ(data[i], std::vector<float>(data[i].size(), sum)) << i;
  }
  std::vector<float> lone(20000, static_cast<float>(rank + 1));  // may be sent with its request
  ASSERT_TRUE(self.engine.Wait(*self.AllreduceWithWaiter(set + "lone", lone), Patience()).ok());
  ASSERT_EQ(lone, std::vector<float>(20000, static_cast<float>(size * (size + 1) / 2)));
}

// Expects the same settings in force on all ranks.
void ExpectTheSame(int rank, int size, Rank& self, const Tunables& own) {
  std::vector<float> values = {
      static_cast<float>(own.fusion_threshold), static_cast<float>(own.arena.small_bytes),
      static_cast<float>(own.arena.chunk_bytes), own.hierarchical ? 1.0f : 0.0f};
  const std::vector<float> before = values;
  ASSERT_TRUE(self.Allreduce("the same", values)->Wait(Patience()).ok());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i], before[i] * static_cast<float>(size)) << "rank " << rank << ", " << i;
  }
}

TEST_P(Autotuning, AgreesOnEveryRankAndChangesNoResult) {
  std::vector<TuningSample> samples;
  EngineConfig config = Quick();
  config.autotune = Brief(&samples);
  config.autotune->steps_per_sample = 1;
  config.autotune->max_samples = Thorough() ? 70 : 10;
  std::vector<Mesh> meshes = GetParam().connect();
  const int size = static_cast<int>(meshes.size());
  OnEveryRank(std::move(meshes), config, [size](int rank, Rank& self) {
    const int steps = Thorough() ? 240 : 40;
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      Step(rank, size, self, "tensor/");
    }
    const Retuning own = self.engine.tuning();
    EXPECT_TRUE(own.last);
    ExpectTheSame(rank, size, self, own.tunables);
  });
  ASSERT_EQ(samples.size(), Thorough() ? 73u : 13u);
  if (!Thorough()) return;  // the search has not tried every value
  std::set<size_t> fusion;
  std::set<size_t> small;
  std::set<size_t> chunk;
  std::set<bool> hierarchical;
  for (const TuningSample& sample : samples) {
    fusion.insert(sample.tunables.fusion_threshold);
    small.insert(sample.tunables.arena.small_bytes);
    chunk.insert(sample.tunables.arena.chunk_bytes);
    hierarchical.insert(sample.tunables.hierarchical);
  }
  EXPECT_EQ(fusion.size(), 6u) << "all thresholds were tried";
  EXPECT_EQ(small.size(), GetParam().arena ? 4u : 1u);
  EXPECT_EQ(chunk.size(), GetParam().arena ? 5u : 1u);
  EXPECT_EQ(hierarchical.size(), std::string(GetParam().name) == "TwoHosts" ? 2u : 1u);
}

TEST_P(Autotuning, ContinuesBesideJoinedRanks) {
  std::vector<TuningSample> samples;
  EngineConfig config = Quick();
  config.autotune = Brief(&samples);
  config.autotune->steps_per_sample = 1;
  config.autotune->max_samples = 20;
  std::vector<Mesh> meshes = GetParam().connect();
  const int size = static_cast<int>(meshes.size());
  OnEveryRank(std::move(meshes), config, [size](int rank, Rank& self) {
    for (int epoch = 0; epoch < 4; ++epoch) {
      const int own_steps = 5 + 5 * ((rank + epoch) % size);  // rank 0 is not always the last one
      for (int step = 0; step < own_steps; ++step) {
        std::vector<float> data(5000, 1.0f);
        ASSERT_TRUE(self.Allreduce("tensor", data)->Wait(Patience()).ok());
        int there = 0;
        for (int other = 0; other < size; ++other) {
          if (step < 5 + 5 * ((other + epoch) % size)) ++there;
        }
        ASSERT_EQ(data, std::vector<float>(5000, static_cast<float>(there)));
      }
      Request join;
      join.name = kJoinName;
      join.kind = OperationKind::kJoin;
      join.shape = {0};
      Result<Pointer> joined = self.engine.Submit(join, nullptr, nullptr);
      ASSERT_TRUE(joined.ok());
      ASSERT_TRUE(joined.value()->Wait(Patience()).ok());
    }
    ExpectTheSame(rank, size, self, self.engine.tuning().tunables);
  });
  EXPECT_GT(samples.size(), 3u);
}

// A process set has its own engine, with other threads over the same ranks.
TEST_P(Autotuning, DoesNotChangeProcessSets) {
  std::vector<TuningSample> samples;
  EngineConfig config = Quick();
  config.autotune = Brief(&samples);
  config.autotune->steps_per_sample = 1;
  std::vector<Mesh> meshes = GetParam().connect();
  const int size = static_cast<int>(meshes.size());
  std::vector<Mesh> of_set = InProcessMeshes(OneHost(size), true, kArenaBytes);
  auto store = std::make_shared<InProcessStore>();
  std::vector<std::unique_ptr<Rank>> set;
  for (Mesh& mesh : of_set) set.push_back(std::make_unique<Rank>(Quick(), std::move(mesh), store));
  OnEveryRank(std::move(meshes), config, [size, &set](int rank, Rank& self) {
    Rank& beside = *set[static_cast<size_t>(rank)];
    const Tunables untouched = beside.engine.tuning().tunables;
    for (int step = 0; step < 30; ++step) {
      std::thread other([&] { Step(rank, size, beside, "set/"); });
      Step(rank, size, self, "tensor/");
      other.join();
    }
    EXPECT_EQ(beside.engine.tuning().tunables, untouched);
    EXPECT_TRUE(beside.engine.tuning().last);
    ExpectTheSame(rank, size, self, self.engine.tuning().tunables);
  });
  EXPECT_GT(samples.size(), 5u);
}

std::vector<Layout> Layouts() {
  std::vector<Layout> layouts = {{"TwoRanks", TwoRanks, true}, {"TwoHosts", TwoHosts, false}};
  if (Thorough()) {
    layouts.push_back({"FourRanks", FourRanks, true});
    layouts.push_back({"Sockets", Sockets, false});
  }
  return layouts;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Autotuning, ::testing::ValuesIn(Layouts()),
                         [](const auto& chosen) { return std::string(chosen.param.name); });

}  // namespace
}  // namespace sparkhvd
