// One order for the collectives of all communicators that use a device.
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

// A kernel of NCCL occupies its device until all ranks of its communicator run theirs. So two ranks
// that launch collectives of two communicators in different orders may wait for each other forever
// (NCCL's user guide, "Using multiple NCCL communicators concurrently").
//
// The ranks agree on the order as in Skeen's total order multicast (Birman and Joseph, "Reliable
// communication in the presence of failures", 1987): once all ranks of a communicator are ready for
// its next collective, each proposes a ticket later than all that its device has seen, and the
// latest proposal is the collective's ticket on all of them. A device launches by ticket, and waits
// while a proposal of its own may still become an earlier one. A rank that has proposed waits only
// for messages, so every proposal is settled soon.
//
// May be used by any thread.
class LaunchOrder {
 public:
  // The turn of a communicator's next collective; it ends at the launch.
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

  // `communicator` is unique among those of the ranks and equal on all of its ranks; it proposes
  // one at a time.
  std::unique_ptr<Turn> Propose(const std::string& communicator);

 private:
  std::mutex mutex_;  // guards what follows; a leaf
  std::condition_variable changed_;
  uint64_t latest_ = 0;  // the latest ticket that was proposed or agreed on
  std::set<Turn::Position> turns_;
};

}  // namespace sparkhvd
