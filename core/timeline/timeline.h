// Records the phases of every tensor as a Chrome trace, which Perfetto opens.
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
  kQueue,      // submitted, but not yet taken by the engine
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

// Ranks are the trace's processes, and tensors their threads. Check on() before recording an event.
// A separate thread writes the events. When the process is killed, at most the events of the last
// kLag are lost, unless the disk is slow. Thread-safe.
class Timeline {
 public:
  static constexpr std::chrono::milliseconds kLag{200};

  Timeline() = default;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline() { (void)Stop(); }

  // Fails with kInvalidArgument during a recording, and with kIo if the file cannot be written.
  Status Start(const TimelineOptions& options);
  // Writes the remaining events and stops writing to the file, which other ranks may still write.
  // Returns a write failure. Does nothing outside a recording.
  Status Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Records that `tensor` is submitted and queued, for an operation called `what`.
  void Begin(const std::string& tensor, const char* what, uint64_t bytes);
  // Ends the current phase of `tensor` and begins `phase`.
  void Enter(const std::string& tensor, Phase phase);
  // Ends the operation. `failure` is empty on success.
  void End(const std::string& tensor, const std::string& failure);
  // Marks the end of a negotiation cycle.
  void MarkCycle();

 private:
  enum class Kind : uint8_t { kTrack, kBegin, kEnd, kPhase, kPhaseEnd, kCycle };
  struct Event {
    Kind kind;
    uint32_t track;
    int64_t time_ns;
    const char* name;
    std::string text;  // a track's name or a failure's reason
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
  TimelineOptions options_;           // changes only while there is no writer
  std::optional<TimelineFile> file_;  // belongs to the writer while there is one
  Status written_;                    // belongs to the writer while there is one
  int64_t epoch_ns_ = 0;              // wall-clock time of the steady clock's zero

  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};
  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  std::condition_variable changed_;
  std::vector<Event> events_;
  std::unordered_map<std::string, Track> tracks_;
  uint64_t dropped_ = 0;
  bool stopping_ = false;
};

// One engine's part in a recording. Its tensors carry the engine's label if several engines share a
// recording.
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
