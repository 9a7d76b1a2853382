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

// The result of a cycle: the operations that all ranks have requested, in the same order on all of
// them.
struct Outcome {
  ResponseMessage response;
  // Set if all ranks requested exactly the same operations, by ids alone: then `response` holds
  // these, and this holds the data that the ranks put beside their messages (in the members'
  // slots).
  std::optional<ArenaSteps::Round> beside;
};

// One rank's side of the cycles. A cycle is Announce, Enter and Conclude; it lasts until all ranks
// have entered it.
class Negotiation {
 public:
  Negotiation(int size, size_t cache_capacity) : cache_(cache_capacity), readiness_(size) {}
  virtual ~Negotiation() = default;
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Splits submissions into those that the cache knows and others.
  RequestMessage Report(const std::vector<const Request*>& submitted) const;

  // Writes this rank's message. The result is room for data that travels along, possibly empty.
  virtual Bytes Announce(const RequestMessage& message) = 0;

  // Publishes the message.
  virtual Status Enter() = 0;

  // Waits until all ranks have entered. Where interruptible(), any thread may call it again after a
  // kTimeout at a `deadline` before the cycle's own.
  virtual Result<Outcome> Conclude(Deadline deadline) = 0;
  virtual bool interruptible() const = 0;

  // Remembers an agreement about `own`; all ranks call it in the order of the response.
  void Remember(const Request& own, const std::vector<int64_t>& rows);

  ResponseCache& cache() { return cache_; }

 protected:
  // Decides which operations are complete with the messages of all ranks, and which will never be.
  // `retuning` is that of rank 0.
  ResponseMessage Decide(Readiness::Time now, double timeout_s,
                         const std::optional<Retuning>& retuning);

  ResponseCache cache_;
  Readiness readiness_;  // on the ranks that decide
};

// Over links: every rank sends the coordinator (rank 0) one message and receives one.
std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s);

// Among ranks of a job that all share an arena: one step, in which every rank reads all messages
// and decides for itself.
std::unique_ptr<Negotiation> MakeArenaNegotiation(ArenaSteps& steps, size_t cache_capacity,
                                                  double collective_timeout_s);

}  // namespace sparkhvd
