#include "timeline/timeline_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/io_status.h"
#include "timeline/json_text.h"

namespace sparkhvd {
namespace {

constexpr char kEnd[] = "\n]\n";
constexpr size_t kEndBytes = sizeof(kEnd) - 1;

// These locks are on bytes far beyond the content. They belong to the open file description. So the
// kernel releases the locks of a killed process, and ranks that are threads of one process hold
// separate locks.
constexpr off_t kTurn = off_t{1} << 40;  // held while a writer joins or leaves
constexpr off_t kPresence = kTurn + 1;   // shared by all writers

constexpr std::chrono::seconds kTurnLimit{5};
constexpr std::chrono::milliseconds kTurnInterval{1};

bool Lock(int fd, short type, off_t byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  int result = 0;
  do {
    result = ::fcntl(fd, F_OFD_SETLK, &lock);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

// Waits for the writers that join or leave. A writer that is stopped meanwhile keeps its turn, so
// the wait has a limit. The kernel offers none.
bool TakeTurn(int fd) {
  const Deadline deadline = Deadline::After(kTurnLimit);
  while (!Lock(fd, F_WRLCK, kTurn)) {
    if (errno != EAGAIN && errno != EACCES) return false;
    if (deadline.Expired()) {
      errno = ETIMEDOUT;
      return false;
    }
    std::this_thread::sleep_for(kTurnInterval);
  }
  return true;
}

// Returns whether this is the only writer. If it is, it now holds the lock exclusively.
bool LockAlone(int fd) { return Lock(fd, F_WRLCK, kPresence); }

std::string Opening(const std::string& recording) {
  return "[\n{\"ph\":\"M\",\"pid\":0,\"name\":\"recording\",\"args\":{\"name\":" +
         JsonText(recording) + "}}";
}

Status WriteAll(int fd, const std::string& text, const std::string& path) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return IoStatus("write the timeline " + path, errno);
    done += static_cast<size_t>(count);
  }
  return Status();
}

bool HasTextAt(int fd, const std::string& text, off_t offset) {
  std::string content(text.size(), '\0');
  const auto size = static_cast<ssize_t>(content.size());
  return ::pread(fd, content.data(), content.size(), offset) == size && content == text;
}

}  // namespace

Result<TimelineFile> TimelineFile::Join(const std::string& path, const std::string& recording) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd.valid()) return IoStatus("open the timeline " + path, errno);
  if (!TakeTurn(fd.get())) return IoStatus("lock the timeline " + path, errno);
  TimelineFile file(std::move(fd), path);
  const Status start = LockAlone(file.fd_.get()) ? file.Begin(recording) : Status();
  // If LockAlone has taken the lock, this makes it shared.
  const bool present = Lock(file.fd_.get(), F_RDLCK, kPresence);
  const int error = errno;
  (void)Lock(file.fd_.get(), F_UNLCK, kTurn);
  if (!start.ok()) {
    file.fd_.Reset();  // otherwise the destructor would append to a file that is not a timeline
    return start;
  }
  if (!present) return IoStatus("lock the timeline " + path, error);
  return file;
}

Status TimelineFile::Begin(const std::string& recording) {
  const std::string opening = Opening(recording);
  struct stat info{};
  if (::fstat(fd_.get(), &info) != 0) return IoStatus("read the timeline " + path_, errno);
  off_t kept = 0;
  if (HasTextAt(fd_.get(), opening, 0)) {
    kept = info.st_size;
    const off_t end = kept - static_cast<off_t>(kEndBytes);
    if (HasTextAt(fd_.get(), kEnd, end)) kept = end;
  }
  // A pipe or a device cannot be truncated, so events are appended to it.
  if (S_ISREG(info.st_mode) && ::ftruncate(fd_.get(), kept) != 0) {
    return IoStatus("truncate the timeline " + path_, errno);
  }
  return kept > 0 ? Status() : WriteAll(fd_.get(), opening, path_);
}

Status TimelineFile::Append(const std::string& lines) { return WriteAll(fd_.get(), lines, path_); }

Status TimelineFile::Leave() {
  if (!fd_.valid()) return Status();
  Status status;
  if (TakeTurn(fd_.get()) && LockAlone(fd_.get())) {
    status = WriteAll(fd_.get(), kEnd, path_);
  }
  fd_.Reset();  // also releases the locks
  return status;
}

}  // namespace sparkhvd
