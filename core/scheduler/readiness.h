// Which operations all ranks have asked for: the coordinator's table. Pure; time is handed in.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler/messages.h"
#include "scheduler/request.h"
#include "scheduler/response_cache.h"

namespace sparkhvd {

class Readiness {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Readiness(int size) : size_(size) {}

  // Takes in what `rank` reported. `cache` is in the state in which the message was written.
  Status Add(int rank, const RequestMessage& message, const ResponseCache& cache, Time now);

  // Everything that became complete since the last call: agreed or refused.
  ResponseMessage TakeComplete();

  // Gives up on operations that some rank asked for before `since` and others still did not.
  std::vector<Agreement> TakeOverdue(const ResponseCache& cache, Time since);

  // Must be called before the cache gives `id` to something else.
  void Forget(uint32_t id, const ResponseCache& cache);

  bool empty() const { return by_name_.empty() && pending_hits_ == 0; }

 private:
  struct Waiting {  // asked for in full by at least one rank
    std::map<int, Request> by_rank;
    Time first{};
    uint64_t order = 0;
  };
  struct Hits {  // asked for by id alone
    std::vector<bool> ranks;
    int count = 0;
    Time first{};
  };

  void AddHit(int rank, uint32_t id, const ResponseCache& cache, Time now);
  void AddRequest(int rank, const Request& request, Time now);
  Agreement Decide(const std::string& name, const Waiting& waiting) const;
  std::string Missing(const std::vector<bool>& present) const;

  int size_;
  uint64_t next_order_ = 0;
  size_t pending_hits_ = 0;  // ids with at least one hit that are not complete
  std::vector<Hits> hits_;   // by id
  std::unordered_map<std::string, Waiting> by_name_;
  ResponseMessage complete_;
};

}  // namespace sparkhvd
