#include "transport/owned_sockets.h"

#include <sys/stat.h>
#include <unistd.h>

namespace sparkhvd {

OwnedSockets::Record::~Record() {
  for (const Socket* socket = last; socket != nullptr;) {
    const Socket* next = socket->next;
    delete socket;
    socket = next;
  }
}

void OwnedSockets::Add(int fd) {
  struct stat info{};
  if (fd < 0 || ::fstat(fd, &info) != 0 || !S_ISSOCK(info.st_mode)) return;
  auto* socket = new Socket{fd, info.st_ino, record_->last};
  while (!record_->last.compare_exchange_weak(socket->next, socket)) continue;
}

void OwnedSockets::CloseCopies() const {
  for (const Socket* socket = record_->last; socket != nullptr; socket = socket->next) {
    struct stat info{};
    if (::fstat(socket->fd, &info) != 0 || !S_ISSOCK(info.st_mode)) continue;
    if (info.st_ino == socket->inode) ::close(socket->fd);
  }
}

}  // namespace sparkhvd
