#include "scheduler/autotuner.h"

#include <algorithm>

namespace sparkhvd {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;

// A step ends after this many names even if no name recurs: a program may give its tensors new
// names in every step.
constexpr size_t kMostNames = 4096;

TuningAxis MakeAxis(std::vector<size_t> values, size_t start,
                    void (*set)(Tunables* tunables, size_t value)) {
  values.push_back(start);
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  const auto index = std::find(values.begin(), values.end(), start) - values.begin();
  return TuningAxis{std::move(values), static_cast<size_t>(index), set};
}

// Returns first, first * factor, ... up to `last`.
std::vector<size_t> Ladder(size_t first, size_t factor, size_t last) {
  std::vector<size_t> values;
  for (size_t value = first; value <= last; value *= factor) values.push_back(value);
  return values;
}

std::vector<TuningAxis> AxesOf(const TuningScope& scope, const Tunables& start) {
  std::vector<TuningAxis> axes;
  if (scope.fusion) {
    axes.push_back(MakeAxis(Ladder(64 * kKiB, 4, 64 * kMiB), start.fusion_threshold,
                            [](Tunables* to, size_t value) { to->fusion_threshold = value; }));
  }
  if (scope.hierarchical) {
    axes.push_back(MakeAxis({0, 1}, start.hierarchical ? 1 : 0,
                            [](Tunables* to, size_t value) { to->hierarchical = value != 0; }));
  }
  if (scope.arena_slot_bytes > 0) {
    axes.push_back(MakeAxis(Ladder(8 * kKiB, 4, 512 * kKiB), start.arena.small_bytes,
                            [](Tunables* to, size_t value) { to->arena.small_bytes = value; }));
    axes.push_back(MakeAxis(Ladder(64 * kKiB, 2, scope.arena_slot_bytes), start.arena.chunk_bytes,
                            [](Tunables* to, size_t value) { to->arena.chunk_bytes = value; }));
  }
  return axes;
}

GridSearch SearchIn(const std::vector<TuningAxis>& axes, size_t samples) {
  std::vector<size_t> lengths;
  GridSearch::Point start;
  for (const TuningAxis& axis : axes) {
    lengths.push_back(axis.values.size());
    start.push_back(axis.start);
  }
  return GridSearch(std::move(lengths), std::move(start), samples);
}

}  // namespace

Autotuner::Autotuner(AutotuneOptions options, const TuningScope& scope, const Tunables& start)
    : options_(std::move(options)),
      start_(start),
      axes_(AxesOf(scope, start)),
      search_(SearchIn(axes_, options_.max_samples)),
      warmups_left_(search_.done() ? 0 : options_.warmup_samples) {
  Propose();
}

// Returns the settings of the current sample: the initial ones during the warm-up, and the best
// ones once the search is done.
Tunables Autotuner::Sampled() const {
  Tunables tunables = start_;
  for (size_t axis = 0; warmups_left_ == 0 && axis < axes_.size(); ++axis) {
    axes_[axis].set(&tunables, axes_[axis].values[search_.point()[axis]]);
  }
  return tunables;
}

void Autotuner::Begin() {
  running_ = !search_.done();
  speeds_.clear();
  seen_.clear();
  step_start_.reset();
}

void Autotuner::Run(const std::vector<Piece>& pieces, Time now) {
  if (!running_) return;
  const bool again = std::any_of(pieces.begin(), pieces.end(), [this](const Piece& piece) {
    return seen_.count(std::string(piece.name)) > 0;
  });
  if (again || seen_.size() >= kMostNames) EndStep(now);
  for (const Piece& piece : pieces) {
    seen_.emplace(piece.name);
    bytes_ += piece.bytes;
  }
}

void Autotuner::EndStep(Time now) {
  if (step_start_) {
    const std::chrono::duration<double> took = now - *step_start_;
    speeds_.push_back(static_cast<double>(bytes_) / std::max(took.count(), 1e-9));
  }
  step_start_ = now;
  seen_.clear();
  bytes_ = 0;
  if (speeds_.size() >= std::max(options_.steps_per_sample, size_t{1})) EndSample();
}

void Autotuner::EndSample() {
  running_ = false;
  const double score = Median(speeds_);
  if (warmups_left_ > 0) {
    Report(TuningSample::Stage::kWarmUp, score);
    --warmups_left_;
  } else {
    Report(TuningSample::Stage::kSearch, score);
    history_.emplace_back(search_.point(), score);
    search_.Take(score);
  }
  Propose();
}

void Autotuner::Propose() {
  retuning_ = Retuning{Sampled(), search_.done()};
  if (!search_.done()) return;
  std::vector<double> scores;
  for (const auto& [point, score] : history_) {
    if (point == search_.point()) scores.push_back(score);
  }
  Report(TuningSample::Stage::kFinal, Median(scores));
}

void Autotuner::Report(TuningSample::Stage stage, double score) const {
  if (options_.report) options_.report(TuningSample{stage, Sampled(), score});
}

}  // namespace sparkhvd
