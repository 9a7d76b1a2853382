#include "transport/memory_groups.h"

#include <algorithm>
#include <cstddef>

namespace sparkhvd {
namespace {

bool MayShare(const AddressRecord& first, const AddressRecord& other) {
  return first.shared_memory && other.shared_memory &&
         first.arena_region_bytes == other.arena_region_bytes;
}

}  // namespace

std::vector<std::vector<int>> MemoryGroups(const std::vector<AddressRecord>& records) {
  const auto record = [&](int rank) -> const AddressRecord& {
    return records[static_cast<size_t>(rank)];
  };
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < static_cast<int>(records.size()); ++rank) {
    // If one rank of a host cannot share memory, its neighbors do not either, so the arena of a
    // host always has all its ranks.
    std::vector<int> neighbors;
    bool all_share = true;
    for (int other = 0; other < static_cast<int>(records.size()); ++other) {
      if (record(other).host_key != record(rank).host_key) continue;
      neighbors.push_back(other);
      all_share = all_share && MayShare(record(rank), record(other));
    }
    if (record(rank).host_key.empty() || !all_share) neighbors = {rank};
    if (neighbors.front() == rank) groups.push_back(neighbors);
  }
  return groups;
}

}  // namespace sparkhvd
