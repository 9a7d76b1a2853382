// Where the ranks of a job leave each other notes: addresses, agreements, failures.
#pragma once

#include <string>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

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
};

}  // namespace sparkhvd
