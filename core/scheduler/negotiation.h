// The exchange in which ranks agree on what to do next.
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

// What a cycle came to: the operations that all ranks have asked for by now, in an order that is
// the same everywhere.
struct Outcome {
  ResponseMessage response;
  // Set where every rank asked for exactly the same, by ids alone: then `response` is what they all
  // asked for, and what each of them put beside its message lies here (in everybody's slots).
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

  // Splits what was submitted into what the cache knows and what it doesn't.
  RequestMessage Report(const std::vector<const Request*>& submitted) const;

  // Writes down what this rank asks for. The result is room for data that travels along, empty
  // where none does.
  virtual Bytes Announce(const RequestMessage& message) = 0;

  // Lets the others read it.
  virtual Status Enter() = 0;

  // Waits until all ranks have entered. After a kTimeout at a `deadline` before the cycle's own it
  // may be called again, by any thread, where interruptible().
  virtual Result<Outcome> Conclude(Deadline deadline) = 0;
  virtual bool interruptible() const = 0;

  // Remembers an agreement about `own`; all ranks call it in the order of the response.
  void Remember(const Request& own, const std::vector<int64_t>& rows);

  ResponseCache& cache() { return cache_; }

 protected:
  // What is complete once everybody's messages were added, and what never will be. `retuning` is
  // what rank 0 has sent.
  ResponseMessage Decide(Readiness::Time now, double timeout_s,
                         const std::optional<Retuning>& retuning);

  ResponseCache cache_;
  Readiness readiness_;  // of whoever decides
};

// Over links: every rank sends the coordinator (rank 0) one message and gets one back.
std::unique_ptr<Negotiation> MakeCoordinatedNegotiation(Transport& transport, size_t cache_capacity,
                                                        double collective_timeout_s);

// Among ranks that share an arena, all of the job: one meeting, in which everybody reads
// everybody's message and decides for itself.
std::unique_ptr<Negotiation> MakeArenaNegotiation(ArenaSteps& steps, size_t cache_capacity,
                                                  double collective_timeout_s);

}  // namespace sparkhvd
