// Everything a rank needs to reach its peers: the links, and the arena of its host where there is
// one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "rendezvous/key_value_store.h"
#include "transport/arena.h"
#include "transport/owned_sockets.h"
#include "transport/transport.h"

namespace sparkhvd {

struct MeshOptions {
  int rank = 0;
  int size = 1;
  std::string token;  // the job's secret; empty only when size is 1
  std::string
      host_key;  // equal for ranks that may share memory; whether they do is decided by trying
  // Local addresses at which peers may reach this rank, the preferred one first.
  std::vector<std::string> bind_hosts = {"127.0.0.1"};
  std::string scope;  // prefix of this mesh's rendezvous keys; unique per mesh of a job
  bool shared_memory = true;
  bool encrypt = false;  // the TCP links; equal on all ranks
  size_t arena_region_bytes = size_t{4} << 20;
  // Polled several times a second while the ranks connect; a failure ends that. May be empty.
  std::function<Status()> interrupted;
  int socket_buffer_bytes = 0;  // 0 leaves the kernel's default; tests set tiny ones
};

struct Mesh {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Arena> arena;  // null for a rank that shares no memory
  // A second arena of the same ranks, for direct calls.
  std::unique_ptr<Arena> direct_arena;
  // All ranks by the arena that they share, the same list on every rank: ascending inside a group
  // and by the first rank. A rank without an arena is a group of its own.
  std::vector<std::vector<int>> memory_groups;
  OwnedSockets sockets;         // those of the links and of the arena
  std::vector<int> host_ranks;  // those with this rank's host key, itself included, ascending
};

// Connects this rank with all others through `rendezvous`; collective. When one of them fails or
// ends meanwhile, all fail with its reason, which stays in the store. Point-to-point bytes travel
// over token-authenticated TCP (Unix sockets inside a host). Ranks of one host agree on an arena
// backed by a memfd that is sent over an authenticated Unix socket; when one of them cannot use it,
// none does.
Result<Mesh> ConnectMesh(const MeshOptions& options, KeyValueStore& rendezvous, Deadline deadline);

// One mesh per rank, all inside this process, for tests: ranks are threads. `hosts[i]` is the host
// of rank i; ranks with the same host share an arena (none where a host has one rank or
// `with_arena` is false).
std::vector<Mesh> InProcessMeshes(const std::vector<int>& hosts, bool with_arena = true,
                                  size_t arena_region_bytes = size_t{64} << 10);

}  // namespace sparkhvd
