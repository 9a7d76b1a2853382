// The board on which the ranks of one engine publish their failures, or that they are done.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "rendezvous/key_value_store.h"

namespace sparkhvd {

// All ranks report the first failure on the board. The links only show that a peer is lost, which
// is rarely the cause.
struct FailureBoard {
  std::shared_ptr<KeyValueStore> store;  // null: each rank knows only its own failures
  std::string scope;                     // unique per engine of a job

  // Publishes the failure of `rank`. Returns the first failure on the board, or `own` if the board
  // cannot be read.
  Status First(const Status& own, int rank) const;

  // Returns the failure on the board, if there is one, without waiting.
  Status Look() const;

  // Waits until all `size` ranks have ended without a failure.
  Status AwaitAllDone(int rank, int size, Deadline deadline) const;

  // Ends the use of Look() on this rank.
  void StopWatching() const;

  // Leaves a will: if the process of `rank` ends without notice, the store publishes that failure.
  // Returns null if the store does not accept the will.
  std::unique_ptr<Will> LeaveWill(int rank) const;

 private:
  std::string Key() const { return scope + "/failure"; }
};

}  // namespace sparkhvd
