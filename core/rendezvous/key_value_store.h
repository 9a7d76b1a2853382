// The key-value store of a job's ranks: addresses, agreements, failures.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// A key that the store sets when the process ends without notice. A will ends before its store.
class Will {
 public:
  virtual ~Will() = default;  // as if the process had ended

  // Withdraws the will: the process leaves in good order, or no other depends on it.
  virtual void Withdraw() = 0;
};

// Keys are set once and stay; setting a key again keeps the first value (so that "first failure" is
// well defined). Implementations: in-process (tests and size 1), TCP client, and the server's own
// local access. Thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual Status Set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Returns the value of `key`, waiting until it is set; kTimeout names the key, kPeerLost means
  // that the server has ended.
  virtual Result<std::string> Get(const std::string& key, Deadline deadline) = 0;

  // Ends the use of `key` on this side: clears what a Get that timed out has left.
  virtual void StopAsking(const std::string& key) { (void)key; }

  // Makes the store set `key` to `value` once this process has ended or is unreachable. Null where
  // the store ends with the process.
  virtual Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                                  Deadline deadline) {
    (void)key, (void)value, (void)deadline;
    return std::unique_ptr<Will>();
  }
};

}  // namespace sparkhvd
