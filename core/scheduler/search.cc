#include "scheduler/search.h"

#include <algorithm>
#include <utility>

namespace sparkhvd {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

GridSearch::GridSearch(std::vector<size_t> lengths, Point start, size_t samples)
    : lengths_(std::move(lengths)), best_(std::move(start)), point_(best_), left_(samples) {
  const auto choice = [](size_t length) { return length > 1; };
  const auto first = std::find_if(lengths_.begin(), lengths_.end(), choice);
  if (first == lengths_.end()) left_ = 0;
  if (left_ > 0) StartAxis(static_cast<size_t>(first - lengths_.begin()));
  Aim();
}

void GridSearch::StartAxis(size_t axis) {
  axis_ = axis;
  rivals_.clear();
  for (size_t value = 0; value < lengths_[axis]; ++value) rivals_.push_back(Rival{value, {}});
  StartRound();
}

// Every other pass is reversed, so that a steady drift cancels out.
void GridSearch::StartRound() {
  const bool final = rivals_.size() == 2;
  const size_t passes = final ? kFinalPairs : std::max(kRoundSamples / rivals_.size(), size_t{1});
  turns_.clear();
  turn_ = 0;
  for (size_t pass = 0; pass < passes; ++pass) {
    for (size_t i = 0; i < rivals_.size(); ++i) {
      turns_.push_back(pass % 2 == 0 ? i : rivals_.size() - 1 - i);
    }
  }
  for (Rival& rival : rivals_) {
    if (final) rival.scores.clear();
  }
}

void GridSearch::Aim() {
  point_ = best_;
  if (left_ > 0) point_[axis_] = rivals_[turns_[turn_]].value;
}

void GridSearch::Take(double score) {
  rivals_[turns_[turn_]].scores.push_back(score);
  --left_;
  ++turn_;
  if (turn_ == turns_.size()) EndRound();
  if (left_ == 0) DecideFinal();
  Aim();
}

void GridSearch::EndRound() {
  if (rivals_.size() == 2) {
    DecideFinal();
    size_t next = (axis_ + 1) % lengths_.size();
    while (lengths_[next] < 2) next = (next + 1) % lengths_.size();
    return StartAxis(next);
  }
  std::stable_sort(rivals_.begin(), rivals_.end(), [](const Rival& a, const Rival& b) {
    return Median(a.scores) > Median(b.scores);
  });
  const size_t kept = (rivals_.size() + 1) / 2;
  const auto in_force = std::find_if(rivals_.begin(), rivals_.end(), [this](const Rival& rival) {
    return rival.value == best_[axis_];
  });
  if (in_force - rivals_.begin() >= static_cast<ptrdiff_t>(kept)) rivals_[kept - 1] = *in_force;
  rivals_.resize(kept);
  StartRound();
}

void GridSearch::DecideFinal() {
  if (rivals_.size() != 2) return;
  const bool first_in_force = rivals_[0].value == best_[axis_];
  const Rival& in_force = rivals_[first_in_force ? 0 : 1];
  const Rival& other = rivals_[first_in_force ? 1 : 0];
  const size_t pairs = std::min(in_force.scores.size(), other.scores.size());
  if (pairs < kLeastPairs) return;
  size_t lost = 0;
  for (size_t pair = 0; pair < pairs; ++pair) {
    if (other.scores[pair] <= in_force.scores[pair]) ++lost;
  }
  if (lost > (pairs == kFinalPairs ? kMostLost : 0)) return;
  if (Median(other.scores) <= Median(in_force.scores) * (1 + kMargin)) return;
  best_[axis_] = other.value;
}

}  // namespace sparkhvd
