// Which algorithm carries out a collective: a pure decision that every rank makes alike.
#pragma once

#include <cstddef>

namespace sparkhvd {

enum class Algorithm {
  kLocal,      // one rank: nothing to move
  kArena,      // through the memory that all ranks share
  kTransport,  // ring, tree or dissemination over the links
};

// What every rank of a job knows about the way its ranks are connected.
struct Topology {
  int size = 1;
  int arena_members = 0;  // ranks in this rank's arena, 0 without one
};

// The arena serves only when it holds the whole job: ranks of several hosts go over the links.
constexpr Algorithm Select(const Topology& topology) {
  if (topology.size == 1) return Algorithm::kLocal;
  return topology.arena_members == topology.size ? Algorithm::kArena : Algorithm::kTransport;
}

}  // namespace sparkhvd
