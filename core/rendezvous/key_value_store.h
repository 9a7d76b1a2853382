// The key-value store of a job's ranks, for addresses, agreements and failures.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// The numbers from `first` to `end` - 1. The names of related keys are a prefix and such a number.
struct NumberRange {
  uint32_t first = 0;
  uint32_t end = 0;
};

// Makes the store set a key if the process ends without notice. Destroy a will before its store.
class Will {
 public:
  virtual ~Will() = default;  // has the same effect as the end of the process

  // Withdraws the will. Call it if the process ends without a failure, or if no other process
  // depends on it any more.
  virtual void Withdraw() = 0;
};

// A key is set once. Setting it again keeps the first value, so that "first failure" is well
// defined. Implementations: in-process (for tests and a world size of 1), TCP client, and the
// server's own local access. Thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual Status Set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Waits until `key` is set and returns its value. Fails with kTimeout and the name of the key, or
  // with kPeerLost if the server has ended.
  virtual Result<std::string> Get(const std::string& key, Deadline deadline) = 0;

  // Waits until the keys that consist of `prefix` and a number are set for all `numbers`. Returns
  // their values in the order of the numbers. Fails like Get. A remote store sends few messages,
  // however many keys there are.
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

  // Returns the numbers whose keys are not set, without waiting for the keys. `deadline` limits the
  // wait for the answer of a remote store.
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

  // Discards what a timed-out Get of `key`, or GetAll of the prefix `key`, has left on this side.
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
