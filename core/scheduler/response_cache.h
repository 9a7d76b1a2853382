// Caches operations that the ranks have agreed on, so that a repeated request takes one bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler/request.h"

namespace sparkhvd {

// Every rank adds the same agreements in the same order, so an id means the same on all ranks. Each
// rank stores its own requests. Where requests differ by rank (the rows of an allgather), the
// agreement has the values of all ranks. The splits of an alltoall are not stored: an id stands for
// an alltoall with any splits.
class ResponseCache {
 public:
  explicit ResponseCache(size_t capacity)
      : capacity_(capacity), seen_(4 * std::min(capacity, kMostRemembered)) {}

  // Returns the id of exactly this request of this rank.
  std::optional<uint32_t> Find(const Request& request) const;

  // Returns the id of `name` for any request.
  std::optional<uint32_t> FindName(const std::string& name) const;

  bool Contains(uint32_t id) const { return id < entries_.size() && entries_[id].used; }
  const Request& Own(uint32_t id) const { return entries_[id].own; }
  const std::vector<int64_t>& Rows(uint32_t id) const { return entries_[id].rows; }

  // Returns the request of `rank` for the agreement `id`.
  Request OfRank(uint32_t id, int rank) const;

  // Notes an agreement about `name`, and returns whether it should be stored: the name has an
  // entry, or was noted before. Names that never recur, such as numbered ones, get no entries.
  // These would evict the entries in use. Each entry also has a few small blocks that live long,
  // between the memory of tensors that are freed soon. glibc could not reuse the memory of these
  // tensors.
  bool Recurs(const std::string& name);

  // Returns the id that Insert will assign to `name`: its current one, a free one or the least
  // recently used. Nothing if the capacity is 0.
  std::optional<uint32_t> NextId(const std::string& name) const;

  // `rows` is as in the agreement.
  void Insert(const Request& own, const std::vector<int64_t>& rows);

  // Marks `id` as the most recently used.
  void Touch(uint32_t id);

  // Returns one more than the highest id in use.
  size_t IdBound() const { return entries_.size(); }

 private:
  struct Entry {
    bool used = false;
    Request own;
    std::vector<int64_t> rows;
    std::list<uint32_t>::iterator position;
  };

  static constexpr size_t kMostRemembered = size_t{1} << 16;

  size_t capacity_;
  std::vector<uint64_t> seen_;  // hash table of the hashes of noted names; 0 is a free slot
  size_t seen_count_ = 0;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, uint32_t> ids_;
  std::list<uint32_t> recent_;  // most recently used first
};

}  // namespace sparkhvd
