// The hierarchy of ranks on several hosts, where the ranks of a host share memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace sparkhvd {

// A group consists of the ranks that share an arena. Links connect the groups. Every group has as
// many lanes as the smallest group has members: the first members of all groups form lane 0, the
// second members lane 1 and so on. Each lane carries its share of the data between groups over its
// own links. Members beyond the last lane only take part inside their group.
struct Hierarchy {
  std::vector<std::vector<int>> groups;  // all ranks; equal on every rank
  int group = 0;                         // this rank's group
  int member = 0;                        // this rank's index in its group

  Hierarchy(std::vector<std::vector<int>> all, int rank) : groups(std::move(all)) {
    for (size_t index = 0; index < groups.size(); ++index) {
      const auto found = std::find(groups[index].begin(), groups[index].end(), rank);
      if (found == groups[index].end()) continue;
      group = static_cast<int>(index);
      member = static_cast<int>(found - groups[index].begin());
    }
  }

  int lanes() const {
    const auto smaller = [](const auto& left, const auto& right) {
      return left.size() < right.size();
    };
    return static_cast<int>(std::min_element(groups.begin(), groups.end(), smaller)->size());
  }

  const std::vector<int>& own_group() const { return groups[static_cast<size_t>(group)]; }
  bool in_lane() const { return member < lanes(); }

  // Returns the ranks of this rank's lane, indexed by group.
  std::vector<int> LaneRanks() const {
    std::vector<int> ranks;
    for (const std::vector<int>& each : groups) ranks.push_back(each[static_cast<size_t>(member)]);
    return ranks;
  }

  int size() const {
    size_t total = 0;
    for (const std::vector<int>& each : groups) total += each.size();
    return static_cast<int>(total);
  }
};

}  // namespace sparkhvd
