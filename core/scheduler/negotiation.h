// The exchange in which ranks agree on the next operations.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "scheduler/messages.h"
#include "scheduler/readiness.h"
#include "scheduler/response_cache.h"
#include "transport/transport.h"

namespace sparkhvd {

// The fan-in of the tree of messages. A rank handles about ten messages in the time that one takes
// to travel between hosts, so a much larger fan-in delays more than another level of the tree.
constexpr int kFanIn = 16;

// The result of a cycle: the operations that all ranks have requested, in the same order on all
// ranks.
struct Outcome {
  ResponseMessage response;
  // Set if all ranks requested exactly the same operations, all of them by their ids in the cache.
  // `response` then holds these operations, and the members' slots of this round hold the data that
  // the ranks deposited next to their messages.
  std::optional<ArenaSteps::Round> deposits;
};

// One rank's side of the cycles. A cycle consists of Announce, Enter and Conclude, and lasts until
// all ranks have entered it.
class Negotiation {
 public:
  Negotiation(int size, size_t cache_capacity) : cache_(cache_capacity), readiness_(size) {}
  virtual ~Negotiation() = default;
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Returns a message with the ids of cached submissions, and with all other submissions in full.
  RequestMessage Report(const std::vector<const Request*>& submitted) const;

  // Writes this rank's message. Returns room for data that is sent with it, possibly empty.
  virtual Bytes Announce(const RequestMessage& message) = 0;

  // Publishes the message.
  virtual Status Enter() = 0;

  // Waits until all ranks have entered, and returns the outcome. If interruptible(), a `deadline`
  // may be earlier than that of the cycle; after its kTimeout, any thread may call Conclude again.
  virtual Result<Outcome> Conclude(Deadline deadline) = 0;
  virtual bool interruptible() const = 0;

  // Stores an agreement about `own` if its name recurs. All ranks call it in the order of the
  // response.
  void Remember(const Request& own, const std::vector<int64_t>& rows);

  ResponseCache& cache() { return cache_; }

 protected:
  // Decides from the messages of all ranks which operations are complete and which never will be.
  // `retuning` comes from the message of rank 0.
  ResponseMessage Decide(Readiness::Time now, double timeout_s,
                         const std::optional<Retuning>& retuning);

  ResponseCache cache_;
  Readiness readiness_;  // used on the ranks that decide
};

// Over links, along a tree with the coordinator (rank 0) as its root: every other rank sends one
// message to its parent and receives one answer. A rank receives at most `fan_in` - 1 messages at
// each level of the tree.
std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s,
                                                        int fan_in = kFanIn);

// For ranks of a job that all share an arena: in one step, every rank reads all messages and
// decides for itself.
std::unique_ptr<Negotiation> MakeArenaNegotiation(ArenaSteps& steps, size_t cache_capacity,
                                                  double collective_timeout_s);

}  // namespace sparkhvd
