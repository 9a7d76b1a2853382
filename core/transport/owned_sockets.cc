#include "transport/owned_sockets.h"

#include <sys/stat.h>
#include <unistd.h>

namespace sparkhvd {

void OwnedSockets::Add(int fd) {
  struct stat info{};
  if (fd >= 0 && ::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode)) {
    sockets_.push_back({fd, info.st_ino});
  }
}

void OwnedSockets::CloseCopies() const {
  for (const Socket& socket : sockets_) {
    struct stat info{};
    if (::fstat(socket.fd, &info) != 0 || !S_ISSOCK(info.st_mode)) continue;
    if (info.st_ino == socket.inode) ::close(socket.fd);
  }
}

}  // namespace sparkhvd
