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

}  // namespace sparkhvd
