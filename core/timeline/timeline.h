// The timeline: the phases of every tensor as a Chrome trace, which Perfetto opens.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "timeline/timeline_file.h"

namespace sparkhvd {

// The phases of a tensor, in this order.
enum class Phase : uint8_t {
  kQueue,      // submitted, not seen by the engine yet
  kNegotiate,  // until all ranks have submitted it
  kWait,       // until the tensors before it are done
  kCopyIn,     // into the fusion buffer
  kCollective,
  kCopyOut,
};

struct TimelineOptions {
  std::string path;
  std::string recording;  // equal on all ranks, unique per start
  int rank = 0;
  bool mark_cycles = false;
};

// Ranks are the trace's processes and tensors their threads. Callers check first whether it is on.
// A thread of its own writes the events: they are at most kLag old when the process is killed.
// Thread-safe.
class Timeline {
 public:
  static constexpr std::chrono::milliseconds kLag{200};

  Timeline() = default;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline() { (void)Stop(); }

  // Fails with kInvalidArgument during a recording, with kIo where the file cannot be written.
  Status Start(const TimelineOptions& options);
  // Writes the remaining events and leaves the file; returns a failure to write. Does nothing when
  // off.
  Status Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // `tensor` is submitted for an operation called `what` and queues.
  void Begin(const std::string& tensor, const char* what, uint64_t bytes);
  // Ends the current phase of `tensor` and begins `phase`.
  void Enter(const std::string& tensor, Phase phase);
  // Ends the operation; `failure` is empty on success.
  void End(const std::string& tensor, const std::string& failure);
  // Marks the end of a cycle of the negotiation.
  void MarkCycle();

 private:
  enum class Kind : uint8_t { kTrack, kBegin, kEnd, kPhase, kPhaseEnd, kCycle };
  struct Event {
    Kind kind;
    uint32_t track;
    int64_t time_ns;
    const char* name;
    std::string text;  // the name of a track or the reason of a failure
    uint64_t bytes;
  };
  struct Track {
    uint32_t id;
    bool open = false;  // between Begin and End
    bool in_phase = false;
  };

  Track& TrackOf(const std::string& tensor);
  void LeavePhase(Track& track, int64_t now);
  void Add(Event event);
  void Write();
  std::string Text(const std::vector<Event>& events) const;
  void AppendText(const Event& event, std::string* lines) const;

  std::mutex turn_;  // one Start or Stop at a time; taken before mutex_
  std::thread writer_;
  TimelineOptions options_;           // changed only while there is no writer
  std::optional<TimelineFile> file_;  // the writer's while there is one
  Status written_;                    // the writer's, likewise
  int64_t epoch_ns_ = 0;              // the wall clock when the steady clock was zero

  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};
  std::mutex mutex_;  // guards what follows; nothing else is locked under it
  std::condition_variable changed_;
  std::vector<Event> events_;
  std::unordered_map<std::string, Track> tracks_;
  uint64_t dropped_ = 0;
  bool stopping_ = false;
};

// An engine's part in a recording: its tensors carry its label where several engines share one.
class EngineTimeline {
 public:
  EngineTimeline(std::shared_ptr<Timeline> timeline, const std::string& label)
      : timeline_(timeline ? std::move(timeline) : std::make_shared<Timeline>()),
        prefix_(label.empty() ? "" : label + ": ") {}

  bool on() const { return timeline_->on(); }
  void Begin(const std::string& tensor, const char* what, uint64_t bytes) {
    timeline_->Begin(prefix_ + tensor, what, bytes);
  }
  void Enter(const std::string& tensor, Phase phase) { timeline_->Enter(prefix_ + tensor, phase); }
  void End(const std::string& tensor, const std::string& failure) {
    timeline_->End(prefix_ + tensor, failure);
  }
  void MarkCycle() {
    if (prefix_.empty()) timeline_->MarkCycle();
  }

  const std::shared_ptr<Timeline>& shared() const { return timeline_; }

 private:
  const std::shared_ptr<Timeline> timeline_;
  const std::string prefix_;
};

}  // namespace sparkhvd
