// Which settings make a noisy thing fastest: decided from scores alone. Pure.
#pragma once

#include <cstddef>
#include <vector>

namespace sparkhvd {

// The middle one; between the two in the middle where their number is even. Of nothing it is 0.
double Median(std::vector<double> values);

// Looks for the point with the highest score in a grid, one axis after the other (coordinate
// descent), beginning again with the first. The values of an axis run against each other with the
// other axes at their best values so far, by sequential halving: a round takes samples of all that
// are left in turn, then the worse half by the median of all their samples drops out (Karnin, Koren
// and Somekh, "Almost optimal exploration in multi-armed bandits", ICML 2013).
//
// Samples of rivals alternate, so that a machine that becomes slower meanwhile is unfair to nobody.
// The value in force always comes into the final, where earlier samples do not count: they favour
// whom luck has brought there. It is replaced when the other one wins all pairs of samples but
// kMostLost (a sign test: of two that are equally good one time in 16; one sample may be spoilt by
// something else) and by kMargin in the median.
class GridSearch {
 public:
  static constexpr size_t kRoundSamples = 6;  // about so many make a round before the final
  static constexpr size_t kFinalPairs = 7;
  static constexpr size_t kMostLost = 1;
  static constexpr size_t kLeastPairs = 3;  // decide, all won, when the samples are used up
  static constexpr double kMargin = 0.02;

  using Point = std::vector<size_t>;  // the number of a value, by axis

  // `lengths`: how many values each axis has. `start`: the values in force. `samples`: how many
  // scores are taken in all.
  GridSearch(std::vector<size_t> lengths, Point start, size_t samples);

  bool done() const { return left_ == 0; }

  // What to take the next sample of; the best point once the search is done.
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
  std::vector<Rival> rivals_;  // what is left of the axis; two are in the final
  std::vector<size_t> turns_;  // of the round: positions in rivals_
  size_t turn_ = 0;
};

}  // namespace sparkhvd
