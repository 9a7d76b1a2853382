// A key-value store for the threads of one process. TcpStoreServer keeps its keys in an
// InProcessStore.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "rendezvous/key_value_store.h"

namespace sparkhvd {

class InProcessStore final : public KeyValueStore {
 public:
  Status Set(const std::string& key, const std::string& value, Deadline deadline) override;
  Result<std::string> Get(const std::string& key, Deadline deadline) override;

  // Returns the value, or nothing if the key is not set.
  std::optional<std::string> Find(const std::string& key) const;

  // Deletes all keys that begin with `prefix`, and returns their number. The keys can be set again.
  size_t Erase(const std::string& prefix);

  // Wakes all waiters in Get with `why`. Later calls fail with `why`, too.
  void Close(const Status& why);

 private:
  mutable std::mutex mutex_;  // guards all fields; innermost in the lock order
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  Status closed_;
};

// Returns kTimeout with the message for a key that is not set.
Status MissingKey(const std::string& key);

}  // namespace sparkhvd
