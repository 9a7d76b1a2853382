// The coordinator's table of the operations that ranks have requested. Pure: time is an argument.
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

  // Adds the message of `rank`. `cache` must be in the state in which the message was written.
  Status Add(int rank, const RequestMessage& message, const ResponseCache& cache, Time now);

  // Returns all operations that became complete since the last call, agreed or rejected. Call it
  // once per cycle, after adding the messages of all ranks. A group arrives in one message, so a
  // partly complete group will never be complete and is rejected as a whole.
  ResponseMessage TakeComplete(const ResponseCache& cache);

  // Rejects operations that some ranks requested before `since` and other ranks have not requested
  // yet.
  std::vector<Agreement> TakeOverdue(const ResponseCache& cache, Time since);

  // Call it before the cache assigns `id` to another operation.
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

  struct Decided {  // a complete operation
    Agreement agreement;
    std::vector<std::string> groups;  // the groups of its requests; more than one if ranks disagree
    uint32_t group_size = 0;
  };
  struct Tally {  // counts the complete operations of a group
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
  void DecideGroups(const ResponseCache& cache);
  std::vector<std::string> TakeWaitingOf(const std::string& group, const ResponseCache& cache);
  void RefuseGroup(const std::string& group, const Tally& tally, const ResponseCache& cache);
  std::string Missing(const std::vector<bool>& present) const;

  int size_;
  uint64_t next_order_ = 0;
  size_t pending_hits_ = 0;  // incomplete ids with at least one hit
  std::vector<Hits> hits_;   // indexed by id
  std::unordered_map<std::string, Waiting> by_name_;

  // A joined rank counts as having requested everything until all ranks have joined.
  std::vector<bool> joined_;  // indexed by rank
  int joined_count_ = 0;
  int last_joined_ = 0;
  bool joins_changed_ = false;

  std::vector<uint32_t> complete_hits_;
  std::vector<Decided> decided_;
  bool groups_complete_ = false;  // whether a complete operation belongs to a group
};

}  // namespace sparkhvd
