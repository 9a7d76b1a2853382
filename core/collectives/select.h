// Chooses the algorithm of a collective. The choice is a pure function with the same result on all
// ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include "transport/link_costs.h"

namespace sparkhvd {

enum class Algorithm {
  kLocal,         // one rank, so nothing moves
  kArena,         // through the memory that all ranks share
  kTransport,     // ring, tree or dissemination over the links
  kHierarchical,  // through memory inside hosts, over links between them
};

// The connections between the ranks of a job. Equal on every rank.
struct Topology {
  int size = 1;
  // Groups of ranks that share memory. A rank that shares none counts as a group.
  int arenas = 0;
};

// Uses the arena only if it holds the whole job. Ranks on several hosts use the links.
constexpr Algorithm Select(const Topology& topology) {
  if (topology.size == 1) return Algorithm::kLocal;
  return topology.arenas == 1 ? Algorithm::kArena : Algorithm::kTransport;
}

// For a collective with a hierarchical form. That form is faster at every size as soon as some
// ranks share memory: its ring has fewer ranks, and fewer bytes leave a host.
constexpr Algorithm Select(const Topology& topology, bool hierarchical) {
  const Algorithm flat = Select(topology);
  const bool shared = topology.arenas < topology.size;
  return flat == Algorithm::kTransport && hierarchical && shared ? Algorithm::kHierarchical : flat;
}

// The algorithm of an allreduce over links.
enum class LinkAlgorithm { kDoubling, kHalving, kRing };

// In a ring, a slice is sent in pieces during the reduction. While a piece arrives, the previous
// piece is combined, still in the cache.
constexpr size_t kRingPieceBytes = size_t{256} << 10;

// The times of reductions over links (Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", 2005).
class ReductionTimes {
 public:
  constexpr ReductionTimes(int size, size_t bytes, const LinkCosts& costs)
      : size_(size), bytes_(static_cast<double>(bytes)), costs_(costs) {
    while (size >> (rounds_ + 1) > 0) ++rounds_;
    if (size > 1 << rounds_) more_ = 1;
    part_ = 1.0 - 1.0 / (1 << rounds_);
    ring_part_ = 1.0 - 1.0 / size;
  }

  constexpr double RingAllreduce() const {
    return Seconds(2.0 * (size_ - 1), 2 * ring_part_, RingCombined());
  }
  // The ranks that combine the data of another rank before the rounds are late in them. The last
  // round connects a late rank with one whose message is there already, if at most half of the
  // ranks in the rounds are late. If at most a quarter are, another round follows for the others,
  // which hides the time for the bytes, too.
  constexpr double DoublingAllreduce() const {
    const int in_rounds = 1 << rounds_;
    const int late = size_ - in_rounds;
    const int messages = rounds_ + 2 * more_ - (more_ > 0 && late <= in_rounds / 2 ? 1 : 0);
    const int moved = rounds_ + 2 * more_ - (more_ > 0 && late <= in_rounds / 4 ? 1 : 0);
    return Seconds(messages, moved, rounds_ + more_);
  }
  constexpr double HalvingAllreduce() const {
    return Seconds(2 * rounds_ + 2 * more_, 2 * part_ + 2 * more_, part_ + more_);
  }
  constexpr double LeastAllreduce() const {
    return std::min({RingAllreduce(), DoublingAllreduce(), HalvingAllreduce()});
  }
  constexpr double RingReducescatter() const {
    return Seconds(size_ - 1, ring_part_, RingCombined());
  }
  constexpr double HalvingReducescatter() const {
    return Seconds(rounds_ + 2 * more_, part_ + more_ * (1 + 1.0 / size_), part_ + more_);
  }

  // Halving uses another link in every round, and TCP starts slowly on a link that was idle. The
  // costs do not contain that: of eight hosts with links of 100 Mbit/s, an allreduce of 8 MiB by
  // halving reached 60 % of the speed of the links, and a ring 92 %. So for long data, a ring may
  // take a little longer by its costs.
  constexpr bool RingIsBetter(double ring, double halving) const {
    constexpr double kLongBytes = 512 << 10;
    constexpr double kLittle = 0.05;
    return ring <= halving || (bytes_ > kLongBytes && ring <= (1 + kLittle) * halving);
  }

 private:
  static constexpr double kCombiningSecondsPerByte = 0.1e-9;

  // Returns the share of the data that a ring combines while nothing arrives: the last piece of
  // each slice, and the part of the others for which the link is too fast.
  constexpr double RingCombined() const {
    const double slice = bytes_ / size_;
    const double last = slice < kRingPieceBytes ? 1.0 : kRingPieceBytes / slice;
    const double hidden = costs_.per_byte / kCombiningSecondsPerByte;
    return ring_part_ * (hidden < 1.0 ? 1.0 - (1.0 - last) * hidden : last);
  }

  constexpr double Seconds(double messages, double moved, double combined) const {
    return messages * costs_.per_message +
           bytes_ * (moved * costs_.per_byte + combined * kCombiningSecondsPerByte);
  }

  const int size_;
  const double bytes_;
  const LinkCosts costs_;
  int rounds_ = 0;
  int more_ = 0;  // rounds before these, and again after them
  double part_ = 0;
  double ring_part_ = 0;
};

// Returns the algorithm that takes the least time.
constexpr LinkAlgorithm SelectForLinks(int size, size_t bytes, const LinkCosts& costs = {}) {
  const ReductionTimes times(size, bytes, costs);
  const double ring = times.RingAllreduce();
  const double doubling = times.DoublingAllreduce();
  const double halving = times.HalvingAllreduce();
  if (doubling <= halving && doubling <= ring) return LinkAlgorithm::kDoubling;
  return times.RingIsBetter(ring, halving) ? LinkAlgorithm::kRing : LinkAlgorithm::kHalving;
}

// Returns the number of parts of an allreduce of `bytes` bytes in which the work inside the `hosts`
// hosts, at both ends of an exchange between them, overlaps with the exchange of other parts. More
// parts hide more of this work, but every part takes time of its own.
constexpr int PartsToOverlap(int hosts, int lanes, size_t bytes, const LinkCosts& costs = {}) {
  constexpr int kMostParts = 16;
  constexpr double kInsidePerByte = 0.2e-9;  // seconds, at both ends together
  constexpr double kPerPart = 100e-6;        // seconds to hand a part to another thread and back
  const LinkCosts shared{costs.per_message, costs.per_byte * lanes};
  int best = 1;
  double least = 0;
  for (int parts = 1; parts <= kMostParts; parts *= 2) {
    const size_t part = bytes / static_cast<size_t>(parts);
    const double inside = static_cast<double>(part) * kInsidePerByte;
    const double between =
        ReductionTimes(hosts, part / static_cast<size_t>(lanes), shared).LeastAllreduce();
    const double seconds = inside + between + (parts - 1) * (std::max(inside, between) + kPerPart);
    if (parts > 1 && seconds >= least) continue;
    best = parts;
    least = seconds;
  }
  return best;
}

// Returns whether a reduce-scatter of `bytes` bytes of every rank uses ReducescatterHalving instead
// of the ring.
constexpr bool ScattersByHalving(int size, size_t bytes, const LinkCosts& costs = {}) {
  const ReductionTimes times(size, bytes, costs);
  return !times.RingIsBetter(times.RingReducescatter(), times.HalvingReducescatter());
}

constexpr double kMostRanksOnAHost = 8;   // they share its link
constexpr double kPerNextMessage = 5e-6;  // seconds between messages whose latencies overlap

// Returns whether an allgather with `bytes` bytes of all ranks together uses AllgatherDoubling
// instead of the ring. Doubling sends all bytes over the link of a host once for every rank of the
// host, so the time for the bytes must be small compared with the latency of a ring.
constexpr bool GathersByDoubling(int size, size_t bytes, const LinkCosts& costs = {}) {
  return static_cast<double>(bytes) * costs.per_byte * kMostRanksOnAHost <
         (size - 1) * costs.per_message;
}

// Returns the most bytes of a part for which AlltoallBruck takes less time than a message to every
// rank, or nothing if all parts are sent directly. A rank does not know how long the parts of
// others are. With long parts, the rounds only add to the time, so they must take at most a third
// of the time of the direct messages.
constexpr std::optional<size_t> MostBytesToRelay(int size, const LinkCosts& costs = {}) {
  int rounds = 0;
  while (1 << rounds < size) ++rounds;
  const double others = size - 1;
  if (3 * rounds * costs.per_message >= others * kPerNextMessage) return std::nullopt;
  constexpr double kMost = 1024;
  const double saved = others * kPerNextMessage - (rounds - 1) * costs.per_message;
  const double per_byte =  // every round sends half of the parts
      (rounds * size / 2.0 - others) * costs.per_byte * kMostRanksOnAHost;
  return static_cast<size_t>(per_byte * kMost < saved ? kMost : saved / per_byte);
}

// How the pieces of a broadcast travel over links: from rank to rank, or down a binomial tree.
struct BroadcastRoute {
  bool chain = false;
  size_t piece_bytes = size_t{512} << 10;
};

// Returns the route that takes the least time. The root of a tree sends all bytes once per level,
// and in a chain every rank sends them once. But the first piece passes all ranks of a chain before
// the last rank has it. A chain therefore pays off for long data only, with pieces that grow with
// the data.
constexpr BroadcastRoute SelectBroadcast(int size, size_t bytes, const LinkCosts& costs = {}) {
  constexpr size_t kSmallest = size_t{32} << 10;
  constexpr size_t kLargest = size_t{4} << 20;
  const auto seconds = [&](double start, size_t length) {
    return start + static_cast<double>(length) * costs.per_byte;
  };
  int levels = 0;
  while (1 << levels < size) ++levels;
  BroadcastRoute best;
  double least = levels * seconds(costs.per_message, bytes);
  for (size_t piece = kSmallest; piece <= kLargest; piece *= 2) {
    const size_t pieces = (bytes + piece - 1) / piece;
    const double first = (size - 1) * seconds(costs.per_message, piece);
    const double chain =
        first + (static_cast<double>(pieces) - 1) * seconds(kPerNextMessage, piece);
    if (chain >= least) continue;
    best = BroadcastRoute{true, piece};
    least = chain;
  }
  return best;
}

}  // namespace sparkhvd
