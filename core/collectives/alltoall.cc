#include "collectives/alltoall.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "collectives/exchange.h"

namespace sparkhvd {
namespace {

// The table of lengths, and the offsets that follow from it.
struct Plan {
  const std::vector<size_t>& lengths;
  size_t size;

  size_t Length(size_t sender, size_t receiver) const { return lengths[sender * size + receiver]; }
  // Returns the offset of the part for `receiver` in the data of `sender`; the total length if
  // `receiver` is past the last rank.
  size_t SourceOffset(size_t sender, size_t receiver) const {
    size_t offset = 0;
    for (size_t other = 0; other < receiver; ++other) offset += Length(sender, other);
    return offset;
  }
  size_t TargetOffset(size_t sender, size_t receiver) const {
    size_t offset = 0;
    for (size_t other = 0; other < sender; ++other) offset += Length(other, receiver);
    return offset;
  }
};

}  // namespace

// In step s, every rank sends to the rank s after it and receives from the rank s before it, so no
// rank serves two others at once.
Status AlltoallPairwise(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                        Bytes target, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const Plan plan{lengths, static_cast<size_t>(size)};
  const auto me = static_cast<size_t>(rank);
  const auto outgoing = [&](size_t peer) {
    return source.Sub(plan.SourceOffset(me, peer), plan.Length(me, peer));
  };
  const auto incoming = [&](size_t peer) {
    return target.Sub(plan.TargetOffset(peer, me), plan.Length(peer, me));
  };
  CopyBytes(incoming(me).data(), outgoing(me).data(), outgoing(me).size());
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    const int from = (rank + size - step) % size;
    SHVD_TRY(Exchange(transport, to, outgoing(static_cast<size_t>(to)), from,
                      incoming(static_cast<size_t>(from)), deadline)
                 .Annotate("exchange step " + std::to_string(step)));
  }
  return Status();
}

// Every round publishes the next section of every member's source. Each member copies its own part
// of it.
Status AlltoallShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                   Bytes target, Deadline deadline) {
  const Plan plan{lengths, static_cast<size_t>(steps.count())};
  const auto me = static_cast<size_t>(steps.member());
  size_t longest = 0;
  for (size_t sender = 0; sender < plan.size; ++sender) {
    longest = std::max(longest, plan.SourceOffset(sender, plan.size));
  }
  const size_t stretch = steps.SlotBytes();
  for (size_t done = 0; done < longest; done += stretch) {
    const ArenaSteps::Round round = steps.StartRound();
    const size_t own = source.size() > done ? std::min(stretch, source.size() - done) : 0;
    CopyBytes(round.Slot(steps.member()), source.data() + done, own);
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    size_t target_offset = 0;  // offset of the sender's part in the target
    for (size_t sender = 0; sender < plan.size; ++sender) {
      const size_t begin = plan.SourceOffset(sender, me);
      const size_t end = begin + plan.Length(sender, me);
      const size_t first = std::max(begin, done);
      const size_t last = std::min(end, done + stretch);
      if (first < last) {
        CopyBytes(target.data() + target_offset + (first - begin),
                  round.Slot(static_cast<int>(sender)) + (first - done), last - first);
      }
      target_offset += plan.Length(sender, me);
    }
  }
  return Status();
}

}  // namespace sparkhvd
