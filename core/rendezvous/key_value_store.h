// The key-value store of a job's ranks, for addresses, agreements and failures.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// The numbers from `first` to `end` - 1, in which the names of related keys end.
struct NumberRange {
  uint32_t first = 0;
  uint32_t end = 0;
};

// Makes the store set a key if the process ends without notice. A will ends before its store.
class Will {
 public:
  virtual ~Will() = default;  // has the same effect as the end of the process

  // Withdraws the will: the process ends in good order, or no other process depends on it.
  virtual void Withdraw() = 0;
};

// A key is set once. Setting it again keeps the first value, so that "first failure" is well
// defined. Implementations: in-process (for tests and a world size of 1), TCP client, and the
// server's own local access. Thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual Status Set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Waits until `key` is set and returns its value. kTimeout names the key. kPeerLost means that
  // the server has ended.
  virtual Result<std::string> Get(const std::string& key, Deadline deadline) = 0;

  // Waits until all keys are set that consist of `prefix` and one of `numbers`, and returns their
  // values in this order. Fails like Get. A remote store answers with few messages, however many
  // keys there are.
  virtual Result<std::vector<std::string>> GetAll(const std::string& prefix, NumberRange numbers,
                                                  Deadline deadline) {
    std::vector<std::string> values;
    for (uint32_t number = numbers.first; number < numbers.end; ++number) {
      auto value = Get(prefix + std::to_string(number), deadline);
      if (!value.ok()) return value.status();
      values.push_back(std::move(value).value());
    }
    return values;
  }

  // Returns those of `numbers` whose keys are not set, without waiting for them. The deadline is
  // for the answer of a remote store, which is one message.
  virtual Result<std::vector<uint32_t>> Missing(const std::string& prefix, NumberRange numbers,
                                                Deadline deadline) {
    (void)deadline;
    std::vector<uint32_t> missing;
    for (uint32_t number = numbers.first; number < numbers.end; ++number) {
      const Status status =
          Get(prefix + std::to_string(number), Deadline::AfterSeconds(0)).status();
      if (status.code() == StatusCode::kTimeout) missing.push_back(number);
      if (!status.ok() && status.code() != StatusCode::kTimeout) return status;
    }
    return missing;
  }

  // Ends the use of `key`, or of the prefix `key`, on this side: discards the state that a
  // timed-out Get or GetAll has left.
  virtual void StopAsking(const std::string& key) { (void)key; }

  // Makes the store set `key` to `value` once this process has ended or is unreachable. Returns
  // null if the store itself ends with the process.
  virtual Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                                  Deadline deadline) {
    (void)key, (void)value, (void)deadline;
    return std::unique_ptr<Will>();
  }
};

}  // namespace sparkhvd
