// A common order for the collectives of all communicators that use a device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/status.h"
#include "device/waiting.h"

namespace sparkhvd {

// An NCCL kernel occupies its device until all ranks of its communicator run theirs. Two ranks that
// launch collectives of two communicators in different orders may therefore wait for each other
// forever (NCCL's user guide, "Using multiple NCCL communicators concurrently").
//
// The ranks agree on the order as in Skeen's total order multicast (Birman and Joseph, "Reliable
// communication in the presence of failures", 1987). Once all ranks of a communicator are ready for
// its next collective, each proposes a ticket that is later than all tickets its device has seen.
// The latest proposal becomes the collective's ticket on all ranks. A device launches in ticket
// order, and waits while one of its own proposals may still become an earlier ticket. A rank that
// has proposed waits only for messages, so every proposal is decided soon.
//
// Any thread may use it.
class LaunchOrder {
 public:
  // The turn of a communicator's next collective. It ends at the launch.
  class Turn {
   public:
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    uint64_t proposal() const { return position_.first; }

    // Waits for all collectives with earlier tickets. `ticket` is the latest proposal of all ranks.
    Status Await(uint64_t ticket, const Waiting& waiting);

   private:
    friend class LaunchOrder;
    using Position = std::pair<uint64_t, std::string>;
    Turn(LaunchOrder& order, Position position) : order_(order), position_(std::move(position)) {}

    LaunchOrder& order_;
    Position position_;  // guarded by the order's mutex
  };

  // `communicator` is equal on all of its ranks and unique among their communicators. A
  // communicator proposes one collective at a time.
  std::unique_ptr<Turn> Propose(const std::string& communicator);

 private:
  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  std::condition_variable changed_;
  uint64_t latest_ = 0;  // the latest proposed or agreed ticket
  std::set<Turn::Position> turns_;
};

}  // namespace sparkhvd
