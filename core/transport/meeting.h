// How ranks that are being connected hear of each other's failures.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "rendezvous/key_value_store.h"

namespace sparkhvd {

// Every wait for another rank's word is also a wait for the word that some rank has failed: its
// own, or the one that it left with the store in case that its process ends. The first failure is
// everybody's.
class Meeting {
 public:
  // `interrupted` is asked several times a second, a failure ends the wait; it may be empty.
  Meeting(KeyValueStore& store, std::string scope, int rank, Deadline deadline,
          std::function<Status()> interrupted)
      : store_(store),
        scope_(std::move(scope)),
        rank_(rank),
        deadline_(deadline),
        interrupted_(std::move(interrupted)) {}

  Status Join();
  Status Set(const std::string& key, const std::string& value);
  Result<std::string> Get(const std::string& key);
  // The failure of another rank, or the interruption. Does not wait: an answer of the store may be
  // there at the next call only.
  Status Check();
  // Tells the others of `own`; returns the failure that came first.
  Status Fail(const Status& own);
  void Leave();

 private:
  std::string FailureKey() const { return scope_ + "/connect-failure"; }

  KeyValueStore& store_;
  const std::string scope_;
  const int rank_;
  const Deadline deadline_;
  const std::function<Status()> interrupted_;
  std::unique_ptr<Will> will_;
};

}  // namespace sparkhvd
