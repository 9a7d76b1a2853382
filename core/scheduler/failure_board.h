// Where the ranks of one engine tell each other why they failed, or that they are done.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "rendezvous/key_value_store.h"

namespace sparkhvd {

// The first reason is everybody's. The links themselves only say that a peer is gone, which is
// rarely the reason.
struct FailureBoard {
  std::shared_ptr<KeyValueStore> store;  // null: everybody is left with what it knows itself
  std::string scope;                     // unique per engine of a job

  // Notes what `rank` knows; the first note on the board, `own` where that cannot be told.
  Status First(const Status& own, int rank) const;

  // The note that is on the board, if there is one; does not wait for any.
  Status Look() const;

  // Waits until all `size` ranks have come to their end in good order.
  Status Meet(int rank, int size, Deadline deadline) const;

  // Nobody here will look again.
  void LookAway() const;

  // Leaves the note that the process of `rank` has ended, should it end without a word. Null where
  // it cannot be left.
  std::unique_ptr<Will> LeaveWill(int rank) const;

 private:
  std::string Key() const { return scope + "/failure"; }
};

}  // namespace sparkhvd
