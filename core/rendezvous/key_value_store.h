// Where the ranks of a job leave each other notes: addresses, agreements, failures.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// What a process leaves with the store in case that it ends without a word. Ends before the store.
class Will {
 public:
  virtual ~Will() = default;  // as if the process had ended

  // The process has left in good order, or nobody depends on it any more.
  virtual void Withdraw() = 0;
};

// Keys are set once and stay; setting a key again keeps the first value (so that "first failure" is
// well defined). Implementations: in-process (tests and size 1), TCP client, and the server's own
// local access. Thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual Status Set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // The value of `key`, waiting until somebody sets it; kTimeout names the key, kPeerLost says that
  // the server is gone.
  virtual Result<std::string> Get(const std::string& key, Deadline deadline) = 0;

  // Nobody here will ask for `key` again: what a Get that ran out of time has left is cleared away.
  virtual void StopAsking(const std::string& key) { (void)key; }

  // Sets `key` to `value` once this process has ended or cannot reach the store any more. Null
  // where the store ends with the process.
  virtual Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                                  Deadline deadline) {
    (void)key, (void)value, (void)deadline;
    return std::unique_ptr<Will>();
  }
};

}  // namespace sparkhvd
