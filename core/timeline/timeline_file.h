// The file of a timeline, which all ranks of a host write together.
#pragma once

#include <string>

#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// A JSON array of events, one a line, that grows at its end. Whole lines go in with one append
// each, so writers in several processes don't mix. It is a valid array once the last writer has
// left; a job that was killed leaves it without the closing bracket, which the format allows.
class TimelineFile {
 public:
  TimelineFile() = default;
  TimelineFile(TimelineFile&&) = default;
  TimelineFile& operator=(TimelineFile&&) = default;
  ~TimelineFile() { (void)Leave(); }

  // Joins those who write to `path` already, or starts the file anew where there are none. What an
  // earlier writer with the same `recording` left is kept: it may have come and gone before this
  // one.
  static Result<TimelineFile> Join(const std::string& path, const std::string& recording);

  // `lines` holds events, each with ",\n" in front.
  Status Append(const std::string& lines);

  // The last one to leave closes the array. Once is enough, twice is harmless.
  Status Leave();

 private:
  TimelineFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Status Begin(const std::string& recording);

  UniqueFd fd_;
  std::string path_;
};

}  // namespace sparkhvd
