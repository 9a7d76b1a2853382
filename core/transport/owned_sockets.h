// The sockets by which peers notice that this process has ended.
#pragma once

#include <sys/types.h>

#include <vector>

namespace sparkhvd {

// Knows sockets that others own, so that a forked child can close its copies of them: as long as it
// keeps them, peers would not notice the end of its parent.
class OwnedSockets {
 public:
  void Add(int fd);
  // In a child, for the child alone. A number that has come to mean another file by now is left
  // alone.
  void CloseCopies() const;

 private:
  struct Socket {
    int fd;
    ino_t inode;
  };
  std::vector<Socket> sockets_;
};

}  // namespace sparkhvd
