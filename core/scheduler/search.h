// Searches for the fastest settings of a noisy system, from scores alone. Pure.
#pragma once

#include <cstddef>
#include <vector>

namespace sparkhvd {

// Returns the median: the mean of the two middle values for an even number of values, 0 without
// values.
double Median(std::vector<double> values);

// Searches a grid for the point with the highest score, one axis after the other (coordinate
// descent), and returns to the first axis after the last one. The values of an axis compete by
// sequential halving, with the other axes at their best values so far: a round samples all
// remaining values in turn, then drops the worse half by the median of all their samples (Karnin,
// Koren and Somekh, "Almost optimal exploration in multi-armed bandits", ICML 2013).
//
// Samples of competing values alternate, so that a slowdown of the machine affects all alike. The
// value in force always reaches the final, in which earlier samples do not count, because they
// favor lucky values. The other finalist replaces it only if it wins all but kMostLost pairs of
// samples and its median is higher by kMargin. This is a sign test that a value passes by chance
// in 1 of 16 finals of two equal values. The lost pair allows for one disturbed sample.
class GridSearch {
 public:
  static constexpr size_t kRoundSamples = 6;  // approximate samples of a round before the final
  static constexpr size_t kFinalPairs = 7;
  static constexpr size_t kMostLost = 1;
  // If the samples run out during the final, so many pairs are enough, and all must be won.
  static constexpr size_t kLeastPairs = 3;
  static constexpr double kMargin = 0.02;

  using Point = std::vector<size_t>;  // indexed by axis: the index of a value

  // `lengths` is the number of values of each axis, `start` the values in force, and `samples` the
  // total number of scores.
  GridSearch(std::vector<size_t> lengths, Point start, size_t samples);

  bool done() const { return left_ == 0; }

  // Returns the point of the next sample, or the best point once the search is done.
  const Point& point() const { return point_; }

  // Records the score of point().
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
  std::vector<Rival> rivals_;  // the remaining values of the axis; the final has two
  std::vector<size_t> turns_;  // order of the round: indices into rivals_
  size_t turn_ = 0;
};

}  // namespace sparkhvd
