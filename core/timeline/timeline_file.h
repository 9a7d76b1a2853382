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

  // Joins the current writers of `path`, or starts the file anew without them. The content of an
  // earlier writer with the same `recording` is kept: it may have ended before this one began.
  static Result<TimelineFile> Join(const std::string& path, const std::string& recording);

  // `lines` holds events, each with ",\n" in front.
  Status Append(const std::string& lines);

  // The last writer closes the array. Calling it twice is harmless.
  Status Leave();

 private:
  TimelineFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Status Begin(const std::string& recording);

  UniqueFd fd_;
  std::string path_;
};

}  // namespace sparkhvd
