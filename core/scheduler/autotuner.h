// Tries settings of the engine on the running job and keeps the best: rank 0's part in tuning.
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
  double score;  // bytes that were reduced per second
};

struct AutotuneOptions {
  size_t warmup_samples = 3;     // discarded
  size_t steps_per_sample = 10;  // at least one
  size_t max_samples = 70;
  std::function<void(const TuningSample&)> report;  // called by the thread that drives the cycle
};

// The settings to tune.
struct TuningScope {
  bool fusion = false;          // the fusion threshold
  bool hierarchical = false;    // whether to use the memory of several hosts
  size_t arena_slot_bytes = 0;  // where allreduces go through one arena of all ranks
};

// The candidate values of one setting.
struct TuningAxis {
  std::vector<size_t> values;  // ascending
  size_t start;                // the index of the initial value
  void (*set)(Tunables*, size_t value);
};

// A step ends when one of its tensors comes again. Its speed is the bytes of its allreduces divided
// by the time until the next step begins, so that a user's computation counts, too: a faster
// allreduce at its expense is no gain. The score of a sample is the median of its steps.
class Autotuner {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Piece {
    std::string_view name;
    size_t bytes;
  };

  // `start`: the settings in force, where the search begins.
  Autotuner(AutotuneOptions options, const TuningScope& scope, const Tunables& start);

  // Returns settings that all ranks have to receive, once.
  std::optional<Retuning> TakeRetuning() { return std::exchange(retuning_, std::nullopt); }

  // Notes that they have come into force.
  void Begin();

  // Notes that these allreduces run now.
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

  // Of the current sample.
  bool running_ = false;                  // whether the sampled settings are in force
  std::vector<double> speeds_;            // of its steps
  std::optional<Time> step_start_;        // none before the first whole step
  std::unordered_set<std::string> seen_;  // names of the step
  size_t bytes_ = 0;
};

}  // namespace sparkhvd
