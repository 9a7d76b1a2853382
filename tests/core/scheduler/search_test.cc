#include "scheduler/search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

namespace sparkhvd {
namespace {

using Point = GridSearch::Point;
using Score = std::function<double(const Point&)>;

const std::vector<size_t> kGridLengths = {6, 1, 4, 5};
constexpr size_t kSamples = 70;

Point BestOf(GridSearch search, const Score& score) {
  size_t samples = 0;
  while (!search.done()) {
    ++samples;
    search.Take(score(search.point()));
  }
  EXPECT_LE(samples, kSamples);
  return search.point();
}

// Returns 1 at the best point, and less with every step away from it.
double Hill(const Point& point, const Point& top) {
  double distance = 0;
  for (size_t axis = 0; axis < point.size(); ++axis) {
    const double steps = static_cast<double>(point[axis]) - static_cast<double>(top[axis]);
    distance += steps * steps;
  }
  return 1 / (1 + 0.1 * distance);
}

TEST(Median, IsInTheMiddle) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 100}), 3);
}

TEST(GridSearch, FindsTheMaximumAnywhere) {
  for (size_t a = 0; a < kGridLengths[0]; ++a) {
    for (size_t c = 0; c < kGridLengths[2]; ++c) {
      const Point top = {a, 0, c, 4};
      const GridSearch search(kGridLengths, {5, 0, 1, 2}, kSamples);
      EXPECT_EQ(BestOf(search, [&top](const Point& point) { return Hill(point, top); }), top);
    }
  }
}

TEST(GridSearch, FindsAPointNearTheMaximumDespiteNoise) {
  const Point top = {1, 0, 2, 4};
  std::mt19937 random(7);  // NOLINT: the same noise every time
  std::normal_distribution<double> noise(0, 0.05);
  std::uniform_int_distribution<int> dice(0, 19);
  int good = 0;
  for (int trial = 0; trial < 100; ++trial) {
    double drift = 1;  // the machine becomes steadily slower
    const Point best =
        BestOf(GridSearch(kGridLengths, {5, 0, 1, 2}, kSamples), [&](const Point& at) {
          const double hiccup = dice(random) == 0 ? 0.3 : 1;
          return Hill(at, top) * (1 + noise(random)) * hiccup * (drift *= 0.995);
        });
    if (Hill(best, top) > 0.8) ++good;
  }
  EXPECT_GE(good, 90) << "of 100";
}

TEST(GridSearch, NoiseAloneChangesLittle) {
  const Point start = {2, 0, 1, 2};
  std::mt19937 random(7);  // NOLINT: the same noise every time
  std::normal_distribution<double> noise(1, 0.3);
  int changes = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const auto score = [&](const Point&) { return noise(random); };
    const Point best = BestOf(GridSearch(kGridLengths, start, kSamples), score);
    for (size_t axis = 0; axis < best.size(); ++axis) changes += best[axis] != start[axis] ? 1 : 0;
  }
  EXPECT_LE(changes, 60) << "of 600 choices";
}

TEST(GridSearch, KeepsTheInitialPointUnlessAnotherIsClearlyBetter) {
  const Point start = {5, 0, 1, 2};
  const auto flat = [&start](const Point& point) { return point == start ? 1.0 : 1.015; };
  EXPECT_EQ(BestOf(GridSearch(kGridLengths, start, kSamples), flat), start);
  const auto better = [&start](const Point& point) { return point[0] == start[0] ? 1.0 : 1.03; };
  EXPECT_NE(BestOf(GridSearch(kGridLengths, start, kSamples), better), start);
}

TEST(GridSearch, KeepsTheBestPointSoFarWhenTheSamplesRunOut) {
  const auto hill = [](const Point& point) { return Hill(point, {1, 0, 2, 4}); };
  const Point start = {5, 0, 1, 2};
  EXPECT_EQ(BestOf(GridSearch(kGridLengths, start, 0), hill), start);
  EXPECT_EQ(BestOf(GridSearch(kGridLengths, start, 17), hill), start) << "too few samples";
  for (size_t samples = 18; samples < kSamples; ++samples) {
    const Point best = BestOf(GridSearch(kGridLengths, start, samples), hill);
    EXPECT_EQ(best[0], 1u) << samples;
    EXPECT_GE(hill(best), hill({1, 0, 1, 2})) << samples;
  }
}

TEST(GridSearch, EndsAtOnceWithoutAChoice) {
  EXPECT_TRUE(GridSearch({}, {}, 10).done());
  EXPECT_TRUE(GridSearch({1, 1}, {0, 0}, 10).done());
}

}  // namespace
}  // namespace sparkhvd
