// The table of operations that ranks have requested, as the coordinator keeps it. Pure; time is an
// argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
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

  explicit Readiness(int size) : size_(size), joined_(static_cast<size_t>(size), false) {}

  // Adds the message of `rank`. `cache` is in the state in which the message was written.
  Status Add(int rank, const RequestMessage& message, const ResponseCache& cache, Time now);

  // Returns all operations that became complete since the last call: agreed or refused. To be
  // called once per cycle, with the messages of all ranks added: a group arrives in one message, so
  // one that is only partly complete will never be complete, and is refused as a whole.
  ResponseMessage TakeComplete(const ResponseCache& cache);

  // Refuses operations that some rank requested before `since` and others still did not.
  std::vector<Agreement> TakeOverdue(const ResponseCache& cache, Time since);

  // Must be called before the cache assigns `id` to another operation.
  void Forget(uint32_t id, const ResponseCache& cache);

  bool empty() const { return by_name_.empty() && pending_hits_ == 0 && joined_count_ == 0; }

 private:
  struct Waiting {  // requested in full by at least one rank
    std::map<int, Request> by_rank;
    Time first{};
    uint64_t order = 0;
  };
  struct Hits {  // requested by id alone
    std::vector<bool> ranks;
    int count = 0;
    Time first{};
  };

  struct Decided {  // complete
    Agreement agreement;
    std::vector<std::string> groups;  // those of its requests: one, unless ranks disagree
    uint32_t group_size = 0;
  };
  struct Tally {  // the complete operations of a group
    uint32_t complete = 0;
    uint32_t size = 0;
    std::string problem;
  };

  void AddHit(int rank, uint32_t id, const ResponseCache& cache, Time now);
  void AddRequest(int rank, const Request& request, Time now);
  void AddJoin(int rank);
  bool IsComplete(const Waiting& waiting) const;
  void CompleteForJoined(const ResponseCache& cache);
  Decided Decide(const std::string& name, const Waiting& waiting) const;
  static std::optional<std::string> NeededFromJoined(const Waiting& waiting);
  void DecideRows(Agreement& agreement, const Waiting& waiting) const;
  void SettleGroups(const ResponseCache& cache);
  std::vector<std::string> TakeWaitingOf(const std::string& group, const ResponseCache& cache);
  void RefuseGroup(const std::string& group, const Tally& tally, const ResponseCache& cache);
  std::string Missing(const std::vector<bool>& present) const;

  int size_;
  uint64_t next_order_ = 0;
  size_t pending_hits_ = 0;  // ids with at least one hit that are not complete
  std::vector<Hits> hits_;   // by id
  std::unordered_map<std::string, Waiting> by_name_;

  // A rank that has joined counts as having requested everything, until all have joined.
  std::vector<bool> joined_;  // by rank
  int joined_count_ = 0;
  int last_joined_ = 0;
  bool joins_changed_ = false;

  std::vector<uint32_t> complete_hits_;
  std::vector<Decided> decided_;
  bool groups_complete_ = false;  // whether a complete operation belongs to a group
};

}  // namespace sparkhvd
