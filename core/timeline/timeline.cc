#include "timeline/timeline.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <system_error>
#include <utility>

#include "timeline/json_text.h"

namespace sparkhvd {
namespace {

// kBatch events wake the writer early. At most kMostWaiting events wait for a slow writer.
constexpr size_t kBatch = 8192;
constexpr size_t kMostWaiting = size_t{1} << 20;
constexpr uint32_t kCycleTrack = 0;

template <typename Clock>
int64_t NanosecondsOn() {
  const auto now = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int64_t Now() { return NanosecondsOn<std::chrono::steady_clock>(); }

const char* NameOf(Phase phase) {
  switch (phase) {
    case Phase::kQueue:
      return "QUEUE";
    case Phase::kNegotiate:
      return "NEGOTIATE";
    case Phase::kWait:
      return "WAIT_FOR_EARLIER_TENSORS";
    case Phase::kCopyIn:
      return "COPY_INTO_FUSION_BUFFER";
    case Phase::kCollective:
      return "COLLECTIVE";
    case Phase::kCopyOut:
      return "COPY_OUT_OF_FUSION_BUFFER";
  }
  return "UNKNOWN";
}

}  // namespace

Status Timeline::Start(const TimelineOptions& options) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (writer_.joinable()) {
    return Status(StatusCode::kInvalidArgument, "a timeline is already being recorded to " +
                                                    options_.path +
                                                    "; stop it before starting another");
  }
  auto file = TimelineFile::Join(options.path, options.recording);
  if (!file.ok()) return file.status();
  file_ = std::move(file).value();
  options_ = options;
  epoch_ns_ = NanosecondsOn<std::chrono::system_clock>() - Now();
  const std::string pid = std::to_string(options.rank);
  const std::string rank = "{\"ph\":\"M\",\"pid\":" + pid + ",\"name\":\"process_";
  written_ = file_->Append(",\n" + rank + "name\",\"args\":{\"name\":\"rank " + pid + "\"}},\n" +
                           rank + "sort_index\",\"args\":{\"sort_index\":" + pid + "}}");
  if (!written_.ok()) {
    file_.reset();  // other ranks may still write the file
    return written_;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tracks_.clear();
    events_.clear();
    dropped_ = 0;
    stopping_ = false;
    if (options.mark_cycles) Add({Kind::kTrack, kCycleTrack, 0, nullptr, "cycles", 0});
  }
  try {
    writer_ = std::thread([this] { Write(); });
  } catch (const std::system_error& error) {
    file_.reset();
    return Status(StatusCode::kIo, std::string("start the timeline's thread: ") + error.what());
  }
  marks_cycles_.store(options.mark_cycles);
  on_.store(true);
  return Status();
}

Status Timeline::Stop() {
  const std::lock_guard<std::mutex> turn(turn_);
  if (!writer_.joinable()) return Status();
  on_.store(false);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  writer_.join();
  const Status left = file_->Leave();
  file_.reset();
  SHVD_TRY(written_);
  return left;
}

void Timeline::Begin(const std::string& tensor, const char* what, uint64_t bytes) {
  const int64_t now = Now();
  const std::lock_guard<std::mutex> lock(mutex_);
  Track& track = TrackOf(tensor);
  Add({Kind::kBegin, track.id, now, what, "", bytes});
  Add({Kind::kPhase, track.id, now, NameOf(Phase::kQueue), "", 0});
  track.open = track.in_phase = true;
}

void Timeline::Enter(const std::string& tensor, Phase phase) {
  const int64_t now = Now();
  const std::lock_guard<std::mutex> lock(mutex_);
  Track& track = TrackOf(tensor);
  if (!track.open) return;  // submitted before the recording started
  LeavePhase(track, now);
  Add({Kind::kPhase, track.id, now, NameOf(phase), "", 0});
  track.in_phase = true;
}

void Timeline::End(const std::string& tensor, const std::string& failure) {
  const int64_t now = Now();
  const std::lock_guard<std::mutex> lock(mutex_);
  Track& track = TrackOf(tensor);
  if (!track.open) return;
  LeavePhase(track, now);
  Add({Kind::kEnd, track.id, now, nullptr, failure, 0});
  track.open = false;
}

void Timeline::MarkCycle() {
  if (!marks_cycles_.load(std::memory_order_relaxed)) return;
  const int64_t now = Now();
  const std::lock_guard<std::mutex> lock(mutex_);
  Add({Kind::kCycle, kCycleTrack, now, "CYCLE", "", 0});
}

Timeline::Track& Timeline::TrackOf(const std::string& tensor) {
  const auto [entry, fresh] = tracks_.try_emplace(tensor);
  if (fresh) {
    entry->second.id = static_cast<uint32_t>(tracks_.size());
    Add({Kind::kTrack, entry->second.id, 0, nullptr, tensor, 0});
  }
  return entry->second;
}

void Timeline::LeavePhase(Track& track, int64_t now) {
  if (track.in_phase) Add({Kind::kPhaseEnd, track.id, now, nullptr, "", 0});
  track.in_phase = false;
}

void Timeline::Add(Event event) {
  if (stopping_) return;
  if (events_.size() >= kMostWaiting) {
    ++dropped_;
    return;
  }
  events_.push_back(std::move(event));
  if (events_.size() == kBatch) changed_.notify_one();
}

void Timeline::Write() {
  pthread_setname_np(pthread_self(), "shvd-timeline");
  sigset_t all;  // the program's own threads handle signals
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::vector<Event> batch;
  bool last = false;
  while (!last) {
    uint64_t dropped = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, kLag, [this] { return stopping_ || events_.size() >= kBatch; });
      last = stopping_;
      std::swap(batch, events_);
      dropped = std::exchange(dropped_, 0);
    }
    if (written_.ok() && !batch.empty()) written_ = file_->Append(Text(batch));
    if (written_.ok() && dropped > 0) {
      written_ = Status(StatusCode::kIo, "the disk of " + options_.path + " was too slow: " +
                                             std::to_string(dropped) + " events are missing");
    }
    batch.clear();
  }
}

std::string Timeline::Text(const std::vector<Event>& events) const {
  std::string lines;
  lines.reserve(events.size() * 64);
  for (const Event& event : events) AppendText(event, &lines);
  return lines;
}

void Timeline::AppendText(const Event& event, std::string* lines) const {
  const int64_t time = event.time_ns + epoch_ns_;
  char suffix[96];
  std::snprintf(suffix, sizeof(suffix), "\"pid\":%d,\"tid\":%" PRIu32 ",\"ts\":%" PRId64 ".%03d}",
                options_.rank, event.track, time / 1000, static_cast<int>(time % 1000));
  switch (event.kind) {
    case Kind::kTrack:
      *lines +=
          ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"args\":{\"name\":" + JsonText(event.text) +
          "}," + suffix;
      break;
    case Kind::kBegin:
      *lines += std::string(",\n{\"ph\":\"B\",\"name\":\"") + event.name +
                "\",\"args\":{\"bytes\":" + std::to_string(event.bytes) + "}," + suffix;
      break;
    case Kind::kPhase:
      *lines += std::string(",\n{\"ph\":\"B\",\"name\":\"") + event.name + "\"," + suffix;
      break;
    case Kind::kEnd:
      *lines += ",\n{\"ph\":\"E\",";
      if (!event.text.empty()) *lines += "\"args\":{\"failure\":" + JsonText(event.text) + "},";
      *lines += suffix;
      break;
    case Kind::kPhaseEnd:
      *lines += std::string(",\n{\"ph\":\"E\",") + suffix;
      break;
    case Kind::kCycle:
      *lines +=
          std::string(",\n{\"ph\":\"i\",\"s\":\"t\",\"name\":\"") + event.name + "\"," + suffix;
      break;
  }
}

}  // namespace sparkhvd
