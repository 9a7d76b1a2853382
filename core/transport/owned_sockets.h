// The sockets by which peers notice that this process has ended.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>

namespace sparkhvd {

// Records sockets that other objects own, so that a forked child can close its copies. While a
// child keeps them open, peers cannot notice the end of its parent. Copies of this object share
// their record, to which several threads may add while another one forks.
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
    const Socket* next;
  };
  // A list that is complete at any moment, because a child may see it in the middle of an Add.
  struct Record {
    std::atomic<const Socket*> last{nullptr};
    ~Record();
  };
  std::shared_ptr<Record> record_ = std::make_shared<Record>();
};

}  // namespace sparkhvd
