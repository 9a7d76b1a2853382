// Everything that a rank needs to reach its peers: the links, and the arena of its host if there is
// one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "rendezvous/key_value_store.h"
#include "rendezvous/socket.h"
#include "transport/address_record.h"
#include "transport/arena.h"
#include "transport/owned_sockets.h"
#include "transport/shared_arena.h"
#include "transport/transport.h"

namespace sparkhvd {

struct MeshOptions {
  int rank = 0;
  int size = 1;
  std::string token;  // the job's secret; empty only if size is 1
  // Ranks with equal keys try to share memory.
  std::string host_key;
  // Local addresses at which peers may reach this rank, preferred address first.
  std::vector<std::string> bind_hosts = {"127.0.0.1"};
  std::string scope;  // prefix of this mesh's rendezvous keys; unique per mesh of a job
  bool shared_memory = true;
  bool encrypt = false;            // encrypt TCP links; equal on all ranks
  CommonSettings common_settings;  // ranks that differ do not connect
  LinkCosts link_costs;            // equal on all ranks
  std::chrono::milliseconds host_timeout =
      kSilentLink;  // a peer whose host is silent longer is lost
  // If set, all links are made at the start. A rank fails once it has dialed a peer for this long
  // and no address of the peer has accepted a connection. It publishes all such peers under the key
  // "unreachable/<rank>", separated by commas. If empty, it dials until the deadline and publishes
  // nothing. All ranks listen before any rank dials, so a rank that is slow to start is not
  // unreachable.
  std::optional<std::chrono::milliseconds> answer_limit;
  size_t arena_region_bytes = size_t{4} << 20;
  // Set if all ranks share memory in another mesh of the job: the watches of that mesh, by rank of
  // this mesh. The links are then memory, too, and need no socket, unless there is no memory for
  // them. Null on all ranks or on none.
  std::shared_ptr<const MemberWatches> neighbors;
  // Polled several times a second while the ranks connect. If it fails, so does ConnectMesh. May be
  // empty.
  std::function<Status()> interrupted;
  int socket_buffer_bytes = 0;  // 0 keeps the kernel's default; tests set tiny buffers
};

struct Mesh {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Arena> arena;  // null if the rank shares no memory
  // A second arena of the same ranks, for direct calls.
  std::unique_ptr<Arena> direct_arena;
  // All ranks grouped by shared arena, equal on every rank. Ranks are ascending inside a group, and
  // groups are in the order of their first ranks. A rank without an arena is a group of its own.
  std::vector<std::vector<int>> memory_groups;
  // The watches of the arena's members, for the meshes of some of them.
  std::weak_ptr<const MemberWatches> watches;
  OwnedSockets sockets;         // the sockets of the links and the arena
  std::vector<int> host_ranks;  // all ranks with this rank's host key, ascending
};

// Connects the ranks through `rendezvous`, in a ring. Other links are made when they are first
// used, unless `answer_limit` is set. All ranks call it. If a rank fails or ends before it is
// connected, the ranks that are not yet connected fail with its reason, which stays in the store.
// Point-to-point data travels over TCP, authenticated with the token, or over Unix sockets inside a
// host, or through memory among `neighbors`. The ranks of one host agree on an arena in a memfd,
// which they pass over an authenticated Unix socket. If one rank cannot use the arena, none does.
Result<Mesh> ConnectMesh(const MeshOptions& options, KeyValueStore& rendezvous, Deadline deadline);

// Makes one mesh per rank inside this process for tests, in which ranks are threads. `hosts[i]` is
// the host of rank i. Ranks with the same host share an arena, unless the host has one rank or
// `with_arena` is false.
std::vector<Mesh> InProcessMeshes(const std::vector<int>& hosts, bool with_arena = true,
                                  size_t arena_region_bytes = size_t{64} << 10);

}  // namespace sparkhvd
