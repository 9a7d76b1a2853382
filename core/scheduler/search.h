// The search for the fastest settings of a noisy system, from scores alone. Pure.
#pragma once

#include <cstddef>
#include <vector>

namespace sparkhvd {

// The median; the mean of the two middle values where their number is even, 0 without values.
double Median(std::vector<double> values);

// Looks for the point with the highest score in a grid, one axis after the other (coordinate
// descent), then starts again with the first. The values of an axis compete with the other axes at
// their best values so far, by sequential halving: a round samples all remaining values in turn,
// then drops the worse half by the median of all their samples (Karnin, Koren and Somekh, "Almost
// optimal exploration in multi-armed bandits", ICML 2013).
//
// Samples of rivals alternate, so that a slowdown of the machine affects all alike. The value in
// force always reaches the final, where earlier samples do not count: they favour lucky values. It
// is replaced when the other one wins all pairs of samples but kMostLost (a sign test: 1 in 16 for
// two equal values; one sample may be disturbed) and wins by kMargin in the median.
class GridSearch {
 public:
  static constexpr size_t kRoundSamples = 6;  // about so many make a round before the final
  static constexpr size_t kFinalPairs = 7;
  static constexpr size_t kMostLost = 1;
  static constexpr size_t kLeastPairs = 3;  // decide, all won, when the samples are used up
  static constexpr double kMargin = 0.02;

  using Point = std::vector<size_t>;  // the index of a value, by axis

  // `lengths`: the number of values of each axis. `start`: the values in force. `samples`: the
  // total number of scores.
  GridSearch(std::vector<size_t> lengths, Point start, size_t samples);

  bool done() const { return left_ == 0; }

  // The point of the next sample; the best point once the search is done.
  const Point& point() const { return point_; }

  // The score of point().
  void Take(double score);

 private:
  struct Rival {
    size_t value;
    std::vector<double> scores;
  };

  void StartAxis(size_t axis);
  void StartRound();
  void EndRound();
  void DecideFinal();
  void Aim();

  const std::vector<size_t> lengths_;
  Point best_;
  Point point_;
  size_t left_;

  size_t axis_ = 0;
  std::vector<Rival> rivals_;  // the remaining values of the axis; two are in the final
  std::vector<size_t> turns_;  // of the round: positions in rivals_
  size_t turn_ = 0;
};

}  // namespace sparkhvd
