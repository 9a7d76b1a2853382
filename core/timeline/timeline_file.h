// The timeline file that all ranks of a host write together.
#pragma once

#include <string>

#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// A JSON array of events, one per line, that grows at its end. Each append writes whole lines, so
// writers in several processes do not interleave them. The array is valid once the last writer has
// left. A killed job leaves it without the closing bracket, which the format allows.
class TimelineFile {
 public:
  TimelineFile() = default;
  TimelineFile(TimelineFile&&) = default;
  TimelineFile& operator=(TimelineFile&&) = default;
  ~TimelineFile() { (void)Leave(); }

  // Joins the current writers of `path`, or starts a new file if there are none. Keeps the content
  // of an earlier writer with the same `recording`, which may have ended before this one began.
  static Result<TimelineFile> Join(const std::string& path, const std::string& recording);

  // `lines` holds events, each preceded by ",\n".
  Status Append(const std::string& lines);

  // The last writer closes the array. A second call is harmless.
  Status Leave();

 private:
  TimelineFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Status Begin(const std::string& recording);

  UniqueFd fd_;
  std::string path_;
};

}  // namespace sparkhvd
