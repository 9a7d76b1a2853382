// The choice of the algorithm of a collective: a pure decision, equal on all ranks.
#pragma once

#include <cstddef>

namespace sparkhvd {

enum class Algorithm {
  kLocal,         // one rank: nothing to move
  kArena,         // through the memory that all ranks share
  kTransport,     // ring, tree or dissemination over the links
  kHierarchical,  // through memory inside hosts, over links between them
};

// How the ranks of a job are connected, as every rank knows it.
struct Topology {
  int size = 1;
  int arenas =
      0;  // groups of ranks that share memory; a rank that shares with nobody counts as one
};

// The arena is used only if it holds the whole job; ranks of several hosts use the links.
constexpr Algorithm Select(const Topology& topology) {
  if (topology.size == 1) return Algorithm::kLocal;
  return topology.arenas == 1 ? Algorithm::kArena : Algorithm::kTransport;
}

// For a collective with a hierarchical form, which is faster at every size as soon as some ranks
// share memory: the ring has fewer ranks, and fewer bytes leave a host.
constexpr Algorithm Select(const Topology& topology, bool hierarchical) {
  const Algorithm flat = Select(topology);
  const bool shared = topology.arenas < topology.size;
  return flat == Algorithm::kTransport && hierarchical && shared ? Algorithm::kHierarchical : flat;
}

}  // namespace sparkhvd
