#include "collectives/broadcast.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/copy.h"

namespace sparkhvd {
namespace {

// Pieces let a rank forward the beginning while the rest still arrives.
constexpr size_t kBroadcastPieceBytes = size_t{512} << 10;

Status PostToChildren(Transport& transport, const std::vector<int>& children, ConstBytes piece,
                      std::vector<Ticket>& tickets) {
  for (const int child : children) {
    const Result<Ticket> posted = transport.PostSend(child, piece);
    SHVD_TRY(posted.status());
    tickets.push_back(posted.value());
  }
  return Status();
}

}  // namespace

// A binomial tree over the ranks relative to the root. The parent of a rank is the rank without its
// lowest set bit. Its children are the ranks with one more, lower bit set.
Status BroadcastTree(Transport& transport, int root, const std::byte* source, Bytes target,
                     Deadline deadline) {
  const int size = transport.size();
  const int relative_rank = (transport.rank() - root + size) % size;
  const auto rank_at = [&](int other) { return (other + root) % size; };
  int lowest = 1;
  while (lowest < size && (relative_rank & lowest) == 0) lowest <<= 1;
  std::vector<int> children;
  for (int bit = lowest >> 1; bit > 0; bit >>= 1) {
    if (relative_rank + bit < size) children.push_back(rank_at(relative_rank + bit));
  }
  if (relative_rank == 0) CopyBytes(target.data(), source, target.size());
  std::vector<Ticket> sends;
  for (size_t done = 0; done < target.size(); done += kBroadcastPieceBytes) {
    const Bytes piece = target.Sub(done, std::min(kBroadcastPieceBytes, target.size() - done));
    if (relative_rank != 0) {
      const Result<Ticket> posted = transport.PostReceive(rank_at(relative_rank - lowest), piece);
      SHVD_TRY(posted.status());
      SHVD_TRY(transport.Wait(Span<const Ticket>(&posted.value(), 1), deadline));
    }
    SHVD_TRY(PostToChildren(transport, children, piece, sends));
  }
  return transport.Wait(Span<const Ticket>(sends.data(), sends.size()), deadline);
}

Status BroadcastShm(ArenaSteps& steps, int root, const std::byte* source, Bytes target,
                    Deadline deadline) {
  const bool is_root = steps.member() == root;
  if (is_root) CopyBytes(target.data(), source, target.size());
  for (size_t done = 0; done < target.size(); done += steps.SlotBytes()) {
    const Bytes piece = target.Sub(done, std::min(steps.SlotBytes(), target.size() - done));
    std::byte* slot = steps.StartRound().Slot(root);
    if (is_root) CopyBytes(slot, piece.data(), piece.size());
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    if (!is_root) CopyBytes(piece.data(), slot, piece.size());
  }
  return Status();
}

}  // namespace sparkhvd
