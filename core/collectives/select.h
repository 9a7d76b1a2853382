// Which algorithm carries out a collective: a pure decision that every rank makes alike.
#pragma once

#include <cstddef>

namespace sparkhvd {

enum class Algorithm {
  kLocal,         // one rank: nothing to move
  kArena,         // through the memory that all ranks share
  kTransport,     // ring, tree or dissemination over the links
  kHierarchical,  // through memory inside hosts, over links between them
};

// What every rank of a job knows about the way its ranks are connected.
struct Topology {
  int size = 1;
  int arenas =
      0;  // groups of ranks that share memory; a rank that shares with nobody counts as one
};

// The arena serves only when it holds the whole job: ranks of several hosts go over the links.
constexpr Algorithm Select(const Topology& topology) {
  if (topology.size == 1) return Algorithm::kLocal;
  return topology.arenas == 1 ? Algorithm::kArena : Algorithm::kTransport;
}

// For a collective that has a hierarchical form: that is better at every size as soon as any ranks
// share memory, because fewer ranks stand in the ring and fewer bytes leave a host.
constexpr Algorithm Select(const Topology& topology, bool hierarchical) {
  const Algorithm flat = Select(topology);
  const bool shared = topology.arenas < topology.size;
  return flat == Algorithm::kTransport && hierarchical && shared ? Algorithm::kHierarchical : flat;
}

}  // namespace sparkhvd
