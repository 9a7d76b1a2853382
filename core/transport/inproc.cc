// A transport for ranks that are threads of one process, for tests of collectives and the engine.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "transport/failures.h"
#include "transport/mesh.h"
#include "transport/shared_arena.h"

namespace sparkhvd {
namespace {

// Connects the ranks. A send completes once its receive has been posted. Sockets are less strict:
// over them, the same calls would deadlock only with larger messages.
class Hub {
 public:
  explicit Hub(int size)
      : members_(static_cast<size_t>(size)),
        channels_(static_cast<size_t>(size) * static_cast<size_t>(size)) {}

  // `length` is the pointer passed to PostReceiveUpTo, and null for other transfers.
  Result<Ticket> Post(int rank, int peer, Direction direction, std::byte* data, size_t size,
                      size_t* length = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Member& member = At(rank);
    if (member.broken) return *member.broken;
    const Ticket ticket = ++member.last_ticket;
    const bool sending = direction == Direction::kSend;
    Channel& channel = sending ? ChannelOf(rank, peer) : ChannelOf(peer, rank);
    member.pending.emplace(ticket, Transfer{direction, peer, data, size, length});
    (sending ? channel.sends : channel.receives).push_back(ticket);
    Match(channel, sending ? rank : peer, sending ? peer : rank);
    return ticket;
  }

  Status Wait(int rank, Span<const Ticket> tickets, Deadline deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    Member& member = At(rank);
    while (true) {
      if (member.broken) return *member.broken;
      const auto open = FirstOpen(member, tickets);
      if (open == member.pending.end()) return Status();
      if (Status lost = FindLost(member); !lost.ok()) {
        Leave(rank, lost);
        return lost;
      }
      if (deadline.Expired()) {
        const Transfer& transfer = open->second;
        const Status late = LateTransfer(transfer.direction, transfer.peer, 0, transfer.size,
                                         transfer.length != nullptr ? kAtMost : kExactly);
        Leave(rank, late);
        return late;
      }
      member.changed.wait_until(lock, deadline.at());
    }
  }

  void Abort(int rank, const Status& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!At(rank).broken) Leave(rank, why);
  }

  // Ends the rank when its owner is destroyed. The peers get no reason.
  void Close(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (At(rank).broken) return;
    Leave(rank, Status(StatusCode::kShutDown, "the transport was closed"));
    At(rank).closed = true;
  }

 private:
  struct Transfer {
    Direction direction;
    int peer;
    std::byte* data;  // a send only reads it
    size_t size;
    size_t* length;  // null if `size` is the length
  };
  struct Member {
    Ticket last_ticket = 0;
    std::map<Ticket, Transfer> pending;
    std::optional<Status> broken;  // set once, when the rank stops taking part
    bool closed = false;           // whether the rank left without a failure
    std::condition_variable changed;
  };
  struct Channel {  // from one rank to another: tickets of the sender and receiver
    std::deque<Ticket> sends;
    std::deque<Ticket> receives;
  };

  Member& At(int rank) { return members_[static_cast<size_t>(rank)]; }
  Channel& ChannelOf(int from, int to) {
    return channels_[static_cast<size_t>(from) * members_.size() + static_cast<size_t>(to)];
  }

  void Match(Channel& channel, int from, int to) {
    Member& sender = At(from);
    Member& receiver = At(to);
    while (!channel.sends.empty() && !channel.receives.empty()) {
      const auto send = sender.pending.find(channel.sends.front());
      const auto receive = receiver.pending.find(channel.receives.front());
      const size_t sent = send->second.size;
      const size_t expected = receive->second.size;
      size_t* const length = receive->second.length;
      if (length != nullptr ? sent > expected : sent != expected) {
        Leave(to, LengthMismatch(from, sent, expected, length != nullptr ? kAtMost : kExactly));
        return;
      }
      if (length != nullptr) *length = sent;
      if (sent > 0) std::memcpy(receive->second.data, send->second.data, sent);
      sender.pending.erase(send);
      receiver.pending.erase(receive);
      channel.sends.pop_front();
      channel.receives.pop_front();
      sender.changed.notify_all();
      receiver.changed.notify_all();
    }
  }

  static std::map<Ticket, Transfer>::const_iterator FirstOpen(const Member& member,
                                                              Span<const Ticket> tickets) {
    for (const Ticket ticket : tickets) {
      const auto found = member.pending.find(ticket);
      if (found != member.pending.end()) return found;
    }
    return member.pending.end();
  }

  Status FindLost(const Member& member) {
    for (const auto& [ticket, transfer] : member.pending) {
      const Member& peer = At(transfer.peer);
      if (!peer.broken) continue;
      const Status why = peer.closed ? PeerLost(transfer.peer, kClosedLinks)
                                     : PeerAborted(transfer.peer, *peer.broken);
      return why.Annotate(TransferName(transfer.direction, transfer.peer));
    }
    return Status();
  }

  // Breaks `rank` for good: its buffers are no longer touched, and all ranks check whether its end
  // affects them.
  void Leave(int rank, const Status& why) {
    Member& leaver = At(rank);
    leaver.broken = why;
    leaver.pending.clear();
    for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
      ChannelOf(rank, peer).sends.clear();
      ChannelOf(peer, rank).receives.clear();
      At(peer).changed.notify_all();
    }
  }

  std::mutex mutex_;  // guards all fields below; innermost in the lock order
  std::deque<Member> members_;
  std::vector<Channel> channels_;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Hub> hub, int rank, int size)
      : hub_(std::move(hub)), rank_(rank), size_(size) {}
  ~InProcessTransport() override { hub_->Close(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    SHVD_TRY(CheckPeer(peer, rank_, size_));
    return hub_->Post(rank_, peer, Direction::kSend, const_cast<std::byte*>(data.data()),
                      data.size());
  }

  Result<Ticket> PostReceive(int peer, Bytes data) override {
    SHVD_TRY(CheckPeer(peer, rank_, size_));
    return hub_->Post(rank_, peer, Direction::kReceive, data.data(), data.size());
  }

  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    SHVD_TRY(CheckPeer(peer, rank_, size_));
    return hub_->Post(rank_, peer, Direction::kReceive, data.data(), data.size(), length);
  }

  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    return hub_->Wait(rank_, tickets, deadline);
  }

  void Abort(const Status& why) override { hub_->Abort(rank_, why); }

 private:
  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const int size_;
};

// Makes the arenas of one host. If there is no memory for them, the ranks continue without arenas.
void ShareArena(std::vector<Mesh>& meshes, const std::vector<int>& ranks, size_t region_bytes) {
  auto mapping = SharedMapping::Anonymous(ArenaPair::Bytes(ranks.size(), region_bytes));
  if (!mapping.ok()) return;
  ArenaPair pair(mapping.value(), ranks.size(), region_bytes);
  pair.Format();
  for (size_t m = 0; m < ranks.size(); ++m) {
    Mesh& mesh = meshes[static_cast<size_t>(ranks[m])];
    mesh.arena = pair.Join(static_cast<int>(m), ranks, nullptr);
    mesh.direct_arena = pair.JoinDirect(static_cast<int>(m), ranks, nullptr);
  }
}

}  // namespace

std::vector<Mesh> InProcessMeshes(const std::vector<int>& hosts, bool with_arena,
                                  size_t arena_region_bytes) {
  const int size = static_cast<int>(hosts.size());
  auto hub = std::make_shared<Hub>(size);
  std::vector<Mesh> meshes(hosts.size());
  std::map<int, std::vector<int>> ranks_of_host;
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < size; ++rank) {
    const auto index = static_cast<size_t>(rank);
    meshes[index].transport = std::make_unique<InProcessTransport>(hub, rank, size);
    ranks_of_host[hosts[index]].push_back(rank);
  }
  for (const auto& [host, ranks] : ranks_of_host) {
    for (const int rank : ranks) meshes[static_cast<size_t>(rank)].host_ranks = ranks;
    if (with_arena && ranks.size() > 1) ShareArena(meshes, ranks, arena_region_bytes);
    const bool shared = meshes[static_cast<size_t>(ranks.front())].arena != nullptr;
    for (const int rank : ranks) {
      if (!shared) groups.push_back({rank});
    }
    if (shared) groups.push_back(ranks);
  }
  std::sort(groups.begin(), groups.end());
  for (Mesh& mesh : meshes) mesh.memory_groups = groups;
  return meshes;
}

}  // namespace sparkhvd
