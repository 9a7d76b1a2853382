// Chooses the algorithm of a collective: a pure decision, equal on all ranks.
#pragma once

#include <cstddef>

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

// The cost of messages that the choice assumes. Measured costs would differ between the ranks,
// which have to choose alike.
struct LinkCosts {
  double seconds_per_message = 30e-6;
  double seconds_per_byte = 0.8e-9;    // 10 Gbit/s
  double seconds_to_combine = 0.1e-9;  // per byte
};

// Returns the greatest number of bytes for which the rounds of AllreduceDoubling cost less than the
// steps of AllreduceRing.
constexpr size_t DoublingBytes(int size, const LinkCosts& costs = {}) {
  if (size < 2) return 0;
  int rounds = 0;
  while (size >> (rounds + 1) > 0) ++rounds;
  if (size > 1 << rounds) rounds += 2;
  const double steps = 2.0 * (size - 1);
  const double moved = steps / size;  // how often a byte leaves a rank in the ring
  const double more = (rounds - moved) * costs.seconds_per_byte +
                      (rounds - moved / 2) * costs.seconds_to_combine;  // per byte
  return static_cast<size_t>((steps - rounds) * costs.seconds_per_message / more);
}

}  // namespace sparkhvd
