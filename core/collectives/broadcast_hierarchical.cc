#include "collectives/broadcast_hierarchical.h"

#include <algorithm>
#include <vector>

#include "collectives/broadcast.h"
#include "collectives/pieces.h"
#include "collectives/select.h"
#include "transport/transport_subset.h"

namespace sparkhvd {
namespace {

// The members that receive from other groups, one per group.
struct Leaders {
  Leaders(const Hierarchy& hierarchy, int root) {
    for (size_t group = 0; group < hierarchy.groups.size(); ++group) {
      const std::vector<int>& members = hierarchy.groups[group];
      const auto found = std::find(members.begin(), members.end(), root);
      const auto member = found == members.end() ? 0 : found - members.begin();
      if (found != members.end()) root_group = static_cast<int>(group);
      if (static_cast<int>(group) == hierarchy.group) own_member = static_cast<int>(member);
      ranks.push_back(members[static_cast<size_t>(member)]);
    }
  }

  std::vector<int> ranks;  // indexed by group
  int root_group = 0;
  int own_member = 0;  // the index of this group's leader
};

}  // namespace

// One rank per group receives a piece over the links and shares it with its group while the next
// pieces are under way. Every byte thus enters a host once.
Status BroadcastHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             int root, const std::byte* source, Bytes target, Deadline deadline) {
  const Leaders leaders(hierarchy, root);
  const auto count = static_cast<int>(leaders.ranks.size());
  const BroadcastRoute route = SelectBroadcast(count, target.size(), transport.costs());
  const auto share = [&](Bytes piece) -> Status {
    if (steps == nullptr) return Status();
    return BroadcastShm(*steps, leaders.own_member, piece.data(), piece, deadline)
        .Annotate("inside the host");
  };
  if (hierarchy.member != leaders.own_member) {
    return ForEachPiece(target, route.piece_bytes, share);
  }
  TransportSubset peers(transport, leaders.ranks);
  return BroadcastLinks(peers, route, leaders.root_group, source, target, deadline, share);
}

}  // namespace sparkhvd
