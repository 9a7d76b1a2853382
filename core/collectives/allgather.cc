#include "collectives/allgather.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "collectives/exchange.h"
#include "collectives/fragments.h"
#include "collectives/select.h"

namespace sparkhvd {
namespace {

std::vector<size_t> Offsets(const std::vector<size_t>& lengths) {
  std::vector<size_t> offsets;
  offsets.reserve(lengths.size());
  size_t offset = 0;
  for (const size_t length : lengths) {
    offsets.push_back(offset);
    offset += length;
  }
  return offsets;
}

}  // namespace

// Each step sends to the right the contribution that the previous step received from the left. The
// first step sends this rank's own contribution.
Status AllgatherRing(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                     Bytes target, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const std::vector<size_t> offsets = Offsets(lengths);
  const auto view = [&](int owner) {
    const auto index = static_cast<size_t>((owner + 2 * size) % size);
    return target.Sub(offsets[index], lengths[index]);
  };
  CopyBytes(view(rank).data(), source.data(), source.size());
  for (int step = 0; step + 1 < size; ++step) {
    SHVD_TRY(Exchange(transport, (rank + 1) % size, view(rank - step), (rank + size - 1) % size,
                      view(rank - step - 1), deadline)
                 .Annotate("ring gather step " + std::to_string(step)));
  }
  return Status();
}

// The algorithm of Bruck, Ho, Kipnis, Upfal and Weathersby ("Efficient algorithms for all-to-all
// communications in multiport message-passing systems", 1997). After the round with distance d, a
// rank holds its own contribution and those of the next 2d - 1 ranks, or all contributions.
Status AllgatherDoubling(Transport& transport, ConstBytes source,
                         const std::vector<size_t>& lengths, Bytes target, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const std::vector<size_t> offsets = Offsets(lengths);
  CopyBytes(target.data() + offsets[static_cast<size_t>(rank)], source.data(), source.size());
  const auto offset_of = [&](int owner) {
    return owner < size ? offsets[static_cast<size_t>(owner)] : target.size();
  };
  // Returns the memory for the contributions of `count` ranks from rank `begin` on. The ranks may
  // wrap around to rank 0.
  const auto pieces = [&](int begin, int count) {
    Fragments found;
    const auto add = [&](int first, int end) {
      const size_t length = offset_of(end) - offset_of(first);
      if (length > 0) found.push_back(target.Sub(offset_of(first), length));
    };
    add(begin, std::min(begin + count, size));
    add(0, std::max(begin + count - size, 0));
    return found;
  };
  for (int distance = 1; distance < size; distance *= 2) {
    const int count = std::min(distance, size - distance);
    const int from = (rank + distance) % size;
    SHVD_TRY(ExchangeFragments(transport, (rank + size - distance) % size, pieces(rank, count),
                               from, pieces(from, count), deadline)
                 .Annotate("gather distance " + std::to_string(distance)));
  }
  return Status();
}

Status AllgatherLinks(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                      Bytes target, Deadline deadline) {
  return (GathersByDoubling(transport.size(), target.size(), transport.costs())
              ? AllgatherDoubling
              : AllgatherRing)(transport, source, lengths, target, deadline);
}

Status AllgatherShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                    Bytes target, Deadline deadline) {
  const std::vector<size_t> offsets = Offsets(lengths);
  const size_t longest = *std::max_element(lengths.begin(), lengths.end());
  const size_t piece = steps.PieceBytes();
  const auto part = [&](size_t length, size_t done) {
    return length > done ? std::min(piece, length - done) : size_t{0};
  };
  for (size_t done = 0; done < longest; done += piece) {
    const ArenaSteps::Round round = steps.StartRound();
    CopyBytes(round.Slot(steps.member()), source.data() + done, part(source.size(), done));
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    for (int member = 0; member < steps.count(); ++member) {
      const auto index = static_cast<size_t>(member);
      CopyBytes(target.data() + offsets[index] + done, round.Slot(member),
                part(lengths[index], done));
    }
  }
  return Status();
}

}  // namespace sparkhvd
