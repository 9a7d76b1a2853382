// The sockets by which peers notice that this process has ended.
#pragma once

#include <sys/types.h>

#include <vector>

namespace sparkhvd {

// Records sockets that others own, so that a forked child can close its copies: while it keeps
// them, peers would not notice the end of its parent.
class OwnedSockets {
 public:
  void Add(int fd);
  // Closes the copies, in a child only. A number that refers to another file by now is skipped.
  void CloseCopies() const;

 private:
  struct Socket {
    int fd;
    ino_t inode;
  };
  std::vector<Socket> sockets_;
};

}  // namespace sparkhvd
