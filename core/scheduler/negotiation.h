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

// A rank handles about ten messages in the time that one message takes to travel between hosts.
constexpr int kFanIn = 16;

// The result of a cycle: the operations that all ranks have requested, in the same order on all
// ranks.
struct Outcome {
  ResponseMessage response;
  // Set if all ranks requested exactly the same operations, by ids alone. `response` then holds
  // these operations. The members' slots of this round hold the data that the ranks put beside
  // their messages.
  std::optional<ArenaSteps::Round> beside;
};

// One rank's side of the cycles. A cycle consists of Announce, Enter and Conclude, and lasts until
// all ranks have entered it.
class Negotiation {
 public:
  Negotiation(int size, size_t cache_capacity) : cache_(cache_capacity), readiness_(size) {}
  virtual ~Negotiation() = default;
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Separates cached submissions from others.
  RequestMessage Report(const std::vector<const Request*>& submitted) const;

  // Writes this rank's message. Returns room for data that is sent with it, possibly empty.
  virtual Bytes Announce(const RequestMessage& message) = 0;

  // Publishes the message.
  virtual Status Enter() = 0;

  // Waits until all ranks have entered. If interruptible(), any thread may call it again after a
  // kTimeout at a `deadline` before the cycle's own.
  virtual Result<Outcome> Conclude(Deadline deadline) = 0;
  virtual bool interruptible() const = 0;

  // Stores an agreement about `own`. All ranks call it in the order of the response.
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

// Over links: every rank sends one message towards the coordinator (rank 0) and receives one. A
// rank receives at most `fan_in` - 1 messages at each level of the tree.
std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s,
                                                        int fan_in = kFanIn);

// For ranks of a job that all share an arena: in one step, every rank reads all messages and
// decides for itself.
std::unique_ptr<Negotiation> MakeArenaNegotiation(ArenaSteps& steps, size_t cache_capacity,
                                                  double collective_timeout_s);

}  // namespace sparkhvd
