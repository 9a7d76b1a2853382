// The exchange in which ranks agree on what to do next.
#pragma once

#include <cstddef>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "scheduler/messages.h"
#include "scheduler/readiness.h"
#include "scheduler/response_cache.h"
#include "transport/transport.h"

namespace sparkhvd {

// One rank's side of the cycles. Every rank sends the coordinator (rank 0) one message and gets one
// back: the operations that all ranks have asked for by now, in an order that is the same
// everywhere. A message is a frame of fixed length, which holds all of it in the steady state, and
// a second transfer where it doesn't fit.
class Negotiation {
 public:
  Negotiation(Transport& transport, size_t cache_capacity, double collective_timeout_s)
      : transport_(transport),
        cache_(cache_capacity),
        readiness_(transport.size()),
        timeout_s_(collective_timeout_s),
        frames_(static_cast<size_t>(transport.size())) {}

  // Splits what was submitted into what the cache knows and what it doesn't.
  RequestMessage Report(const std::vector<const Request*>& submitted) const;

  // Runs one cycle; waits until all ranks have entered it.
  Result<ResponseMessage> Cycle(const RequestMessage& message);

  // Remembers an agreement about `own`; all ranks call it in the order of the response.
  void Remember(const Request& own, const std::vector<int64_t>& first_dims);

  ResponseCache& cache() { return cache_; }

 private:
  using Frame = std::vector<std::byte>;

  Result<ResponseMessage> Coordinate(const RequestMessage& own);
  Result<ResponseMessage> Follow(const RequestMessage& own);
  Status CollectFromAll(Deadline deadline);

  Transport& transport_;
  ResponseCache cache_;
  Readiness readiness_;  // the coordinator's alone
  double timeout_s_;
  std::vector<Frame> frames_;  // by rank; kept to save allocations
};

}  // namespace sparkhvd
