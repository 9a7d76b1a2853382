// Reports failures to the other ranks while all ranks connect.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "rendezvous/key_value_store.h"

namespace sparkhvd {

// A wait for another rank also ends once a rank fails. A rank publishes its failure, or the store
// publishes the will that the rank left for the end of its process. All ranks report the first
// failure.
class Meeting {
 public:
  // `interrupted` is polled several times a second, and its failure ends the wait. It may be empty.
  Meeting(KeyValueStore& store, std::string scope, int rank, Deadline deadline,
          std::function<Status()> interrupted)
      : store_(store),
        scope_(std::move(scope)),
        rank_(rank),
        deadline_(deadline),
        interrupted_(std::move(interrupted)) {}

  Status Join();
  Status Set(const std::string& key, const std::string& value);
  // Waits until each of these ranks has set the key `what`/rank, and returns their values in order.
  // A failure names the first rank that did not set its key in time.
  Result<std::vector<std::string>> GetAll(const std::string& what, NumberRange ranks);
  // Returns the failure of another rank, or the interruption, without waiting. The answer of the
  // store may arrive too late for this call. The next call then returns it.
  Status Check();
  // Sets the key of a rank that is about to fail. The rank fails anyway, so errors do not matter.
  void Report(const std::string& key, const std::string& value);
  // Publishes `own` and returns the first failure.
  Status Fail(const Status& own);
  void Leave();

 private:
  Status FirstMissing(const std::string& what, NumberRange ranks, const Status& late);
  std::string FailureKey() const { return scope_ + "/connect-failure"; }

  KeyValueStore& store_;
  const std::string scope_;
  const int rank_;
  const Deadline deadline_;
  const std::function<Status()> interrupted_;
  std::unique_ptr<Will> will_;
};

}  // namespace sparkhvd
