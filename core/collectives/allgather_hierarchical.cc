#include "collectives/allgather_hierarchical.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "collectives/fragments.h"
#include "collectives/select.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

size_t TotalBytes(const Fragments& fragments) {
  size_t total = 0;
  for (const Bytes fragment : fragments) total += fragment.size();
  return total;
}

// Returns the fragments that hold the bytes of `part`.
Fragments Cut(const Fragments& whole, Slice part) {
  Fragments cut;
  size_t before = 0;
  for (const Bytes fragment : whole) {
    const size_t begin = std::max(part.begin, before);
    const size_t end = std::min(part.begin + part.count, before + fragment.size());
    if (begin < end) cut.push_back(fragment.Sub(begin - before, end - begin));
    before += fragment.size();
  }
  return cut;
}

// Copies `fragments[m]`, the data of member m, to all other members.
Status SpreadShm(ArenaSteps& steps, const std::vector<Fragments>& fragments, Deadline deadline) {
  size_t longest = 0;
  for (const Fragments& each : fragments) longest = std::max(longest, TotalBytes(each));
  for (size_t done = 0; done < longest; done += steps.SlotBytes()) {
    const ArenaSteps::Round round = steps.StartRound();
    const auto part = [&](int member) {
      return Cut(fragments[static_cast<size_t>(member)], Slice{done, steps.SlotBytes()});
    };
    std::byte* shown = round.Slot(steps.member());
    for (const Bytes fragment : part(steps.member())) {
      CopyBytes(shown, fragment.data(), fragment.size());
      shown += fragment.size();
    }
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    for (int member = 0; member < steps.count(); ++member) {
      if (member == steps.member()) continue;
      const std::byte* seen = round.Slot(member);
      for (const Bytes fragment : part(member)) {
        CopyBytes(fragment.data(), seen, fragment.size());
        seen += fragment.size();
      }
    }
  }
  return Status();
}

// The share that each lane carries of each group's contributions. The contributions of one host may
// be scattered over the result, because the result is in rank order.
class Shares {
 public:
  Shares(const Hierarchy& hierarchy, const std::vector<size_t>& lengths, Bytes target)
      : lanes_(hierarchy.lanes()) {
    std::vector<size_t> offsets(lengths.size());
    for (size_t rank = 1; rank < lengths.size(); ++rank) {
      offsets[rank] = offsets[rank - 1] + lengths[rank - 1];
    }
    for (const std::vector<int>& ranks : hierarchy.groups) {
      Fragments block;
      for (const int rank : ranks) {
        const auto index = static_cast<size_t>(rank);
        if (lengths[index] > 0) block.push_back(target.Sub(offsets[index], lengths[index]));
      }
      blocks_.push_back(std::move(block));
    }
  }

  Fragments Of(int group, int lane) const {
    const Fragments& block = blocks_[static_cast<size_t>(group)];
    return Cut(block, SliceOf(TotalBytes(block), lanes_, lane));
  }

 private:
  const int lanes_;
  std::vector<Fragments> blocks_;  // indexed by group
};

// Exchanges the shares of all groups between the members of a lane.
class LaneGather {
 public:
  LaneGather(Transport& transport, const Hierarchy& hierarchy, const Shares& shares,
             Deadline deadline)
      : transport_(transport),
        hierarchy_(hierarchy),
        shares_(shares),
        ranks_(hierarchy.LaneRanks()),
        deadline_(deadline) {}

  // `bytes` is the approximate length of all shares. It decides which algorithm runs.
  Status Run(size_t bytes) const {
    return (GathersByDoubling(count(), bytes, transport_.costs()) ? ByDoubling() : AroundRing())
        .Annotate("between hosts");
  }

 private:
  int count() const { return static_cast<int>(ranks_.size()); }
  int GroupAt(int distance) const { return (hierarchy_.group + distance + 2 * count()) % count(); }
  int RankAt(int distance) const { return ranks_[static_cast<size_t>(GroupAt(distance))]; }

  // Returns the shares of `number` consecutive groups, beginning `distance` groups after this
  // rank's group.
  Fragments SharesFrom(int distance, int number) const {
    Fragments fragments;
    for (int group = distance; group < distance + number; ++group) {
      const Fragments share = shares_.Of(GroupAt(group), hierarchy_.member);
      fragments.insert(fragments.end(), share.begin(), share.end());
    }
    return fragments;
  }

  // Every step sends to the right the share that came from the left in the previous step. The
  // first step sends the share of this rank's group.
  Status AroundRing() const {
    for (int step = 0; step + 1 < count(); ++step) {
      SHVD_TRY(ExchangeFragments(transport_, RankAt(1), SharesFrom(-step, 1), RankAt(-1),
                                 SharesFrom(-step - 1, 1), deadline_)
                   .Annotate("ring gather step " + std::to_string(step)));
    }
    return Status();
  }

  // Like AllgatherDoubling.
  Status ByDoubling() const {
    for (int distance = 1; distance < count(); distance *= 2) {
      const int number = std::min(distance, count() - distance);
      SHVD_TRY(ExchangeFragments(transport_, RankAt(-distance), SharesFrom(0, number),
                                 RankAt(distance), SharesFrom(distance, number), deadline_)
                   .Annotate("gather distance " + std::to_string(distance)));
    }
    return Status();
  }

  Transport& transport_;
  const Hierarchy& hierarchy_;
  const Shares& shares_;
  const std::vector<int> ranks_;
  const Deadline deadline_;
};

// Returns the contributions of other groups that each member of this group holds after the exchange
// between hosts.
std::vector<Fragments> Carried(const Hierarchy& hierarchy, const Shares& shares) {
  std::vector<Fragments> carried(hierarchy.own_group().size());
  for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
    Fragments& held = carried[static_cast<size_t>(lane)];
    for (int group = 0; group < static_cast<int>(hierarchy.groups.size()); ++group) {
      if (group == hierarchy.group) continue;
      const Fragments share = shares.Of(group, lane);
      held.insert(held.end(), share.begin(), share.end());
    }
  }
  return carried;
}

}  // namespace

// Three steps: the members of a group share their contributions; every lane exchanges its share of
// all groups' contributions; the members of a group share the data that arrived. Every byte thus
// enters a host once.
Status AllgatherHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             ConstBytes source, const std::vector<size_t>& lengths, Bytes target,
                             Deadline deadline) {
  std::vector<Fragments> contributions;  // of this group, indexed by member
  for (const int rank : hierarchy.own_group()) {
    size_t offset = 0;
    for (int other = 0; other < rank; ++other) offset += lengths[static_cast<size_t>(other)];
    const size_t length = lengths[static_cast<size_t>(rank)];
    contributions.push_back(length > 0 ? Fragments{target.Sub(offset, length)} : Fragments{});
  }
  for (const Bytes own : contributions[static_cast<size_t>(hierarchy.member)]) {
    CopyBytes(own.data(), source.data(), source.size());
  }
  if (steps != nullptr) {
    SHVD_TRY(SpreadShm(*steps, contributions, deadline).Annotate("inside the host"));
  }
  const Shares shares(hierarchy, lengths, target);
  if (hierarchy.in_lane()) {
    SHVD_TRY(LaneGather(transport, hierarchy, shares, deadline)
                 .Run(target.size() / static_cast<size_t>(hierarchy.lanes())));
  }
  if (steps == nullptr) return Status();
  return SpreadShm(*steps, Carried(hierarchy, shares), deadline)
      .Annotate("inside the host, after the exchange between hosts");
}

}  // namespace sparkhvd
