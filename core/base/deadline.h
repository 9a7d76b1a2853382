// A monotonic deadline. The outermost call of an operation creates one and passes it down.
#pragma once

#include <algorithm>
#include <chrono>

namespace sparkhvd {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline After(std::chrono::nanoseconds duration) {
    const auto now = Clock::now();
    const auto room = Clock::time_point::max() - now;
    return Deadline(now + std::min(std::chrono::duration_cast<Clock::duration>(duration), room));
  }
  // Expires at once if `seconds` is negative or NaN.
  static Deadline AfterSeconds(double seconds) {
    constexpr double kCentury = 3.0e9;
    const double limited = seconds > 0 ? std::min(seconds, kCentury) : 0;
    return After(std::chrono::nanoseconds(static_cast<int64_t>(limited * 1e9)));
  }

  static Deadline Never() { return Deadline(Clock::time_point::max()); }

  static Deadline Earlier(Deadline one, Deadline other) {
    return one.at_ < other.at_ ? one : other;
  }
  Deadline Later(std::chrono::duration<double> by) const {
    const auto step = std::chrono::duration_cast<Clock::duration>(by);
    return Deadline(at_ + std::min(step, Clock::time_point::max() - at_));
  }

  Clock::time_point at() const { return at_; }
  bool Expired() const { return Clock::now() >= at_; }
  std::chrono::nanoseconds Remaining() const {
    return std::max(std::chrono::nanoseconds(0),
                    std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now()));
  }
  // The timeout for poll(2): at least 1 while time is left, so that a wait never becomes a busy
  // loop.
  int RemainingMillis(int cap = 1000) const {
    const auto left = Remaining();
    if (left.count() <= 0) return 0;
    const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
    return static_cast<int>(std::min<int64_t>(millis, cap));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace sparkhvd
