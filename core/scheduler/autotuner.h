// Tries settings of the engine while the job runs, and keeps the best ones. Runs on rank 0.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "scheduler/search.h"
#include "scheduler/tunables.h"

namespace sparkhvd {

struct TuningSample {
  enum class Stage { kWarmUp, kSearch, kFinal };
  Stage stage;
  Tunables tunables;
  double score;  // bytes reduced per second
};

struct AutotuneOptions {
  size_t warmup_samples = 3;     // samples at the beginning that do not count
  size_t steps_per_sample = 10;  // 0 counts as 1
  size_t max_samples = 70;
  std::function<void(const TuningSample&)> report;  // called by the thread that drives the cycle
};

// Selects the settings to tune.
struct TuningScope {
  bool fusion = false;        // tune the fusion threshold
  bool hierarchical = false;  // tune the choice between flat and hierarchical allreduce
  // The slot size of the arena, whose thresholds are tuned. 0 unless all ranks share one arena.
  size_t arena_slot_bytes = 0;
};

// The candidate values of one setting.
struct TuningAxis {
  std::vector<size_t> values;  // ascending
  size_t start;                // index of the initial value
  void (*set)(Tunables*, size_t value);
};

// Searches for the settings with the highest score. A step ends when one of its tensors recurs. The
// speed of a step is the bytes of its allreduces divided by the time until the next step begins.
// That time includes the user's computation, because a faster allreduce that slows the computation
// gains nothing. The score of a sample is the median of its steps' speeds.
class Autotuner {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Piece {
    std::string_view name;
    size_t bytes;
  };

  // The search begins at `start`, the settings in force.
  Autotuner(AutotuneOptions options, const TuningScope& scope, const Tunables& start);

  // Returns the new settings that all ranks must receive; nullopt if there are none since the last
  // call.
  std::optional<Retuning> TakeRetuning() { return std::exchange(retuning_, std::nullopt); }

  // Records that the new settings are in force.
  void Begin();

  // Records that these allreduces start now.
  void Run(const std::vector<Piece>& pieces, Time now);

 private:
  Tunables Sampled() const;
  void EndStep(Time now);
  void EndSample();
  void Propose();
  void Report(TuningSample::Stage stage, double score) const;

  const AutotuneOptions options_;
  const Tunables start_;
  const std::vector<TuningAxis> axes_;
  GridSearch search_;
  std::vector<std::pair<GridSearch::Point, double>> history_;
  size_t warmups_left_;
  std::optional<Retuning> retuning_;

  // The state of the current sample.
  bool running_ = false;                  // whether the current sample is being measured
  std::vector<double> speeds_;            // of the sample's steps
  std::optional<Time> step_start_;        // empty before the first complete step
  std::unordered_set<std::string> seen_;  // names in the current step
  size_t bytes_ = 0;
};

}  // namespace sparkhvd
