// The sockets by which peers notice that this process has ended.
#pragma once

#include <sys/types.h>

#include <vector>

namespace sparkhvd {

// Records sockets that other objects own, so that a forked child can close its copies. While a
// child keeps them open, peers cannot notice the end of its parent.
class OwnedSockets {
 public:
  void Add(int fd);
  // Closes the copies, in a forked child only. Skips a descriptor number that now refers to another
  // file.
  void CloseCopies() const;

 private:
  struct Socket {
    int fd;
    ino_t inode;
  };
  std::vector<Socket> sockets_;
};

}  // namespace sparkhvd
