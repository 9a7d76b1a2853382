#include "collectives/broadcast.h"

#include <optional>
#include <vector>

#include "base/copy.h"
#include "collectives/pieces.h"

namespace sparkhvd {
namespace {

// The ranks that a rank receives from and sends to; the root has no parent.
struct Neighbors {
  std::optional<int> parent;
  std::vector<int> children;
};

// A binomial tree over the ranks relative to the root. The parent of a rank lacks the lowest set
// bit of the rank. The children have one additional bit, which is below the rank's lowest set bit.
Neighbors InTree(int relative, int size) {
  Neighbors own;
  int lowest = 1;
  while (lowest < size && (relative & lowest) == 0) lowest <<= 1;
  if (relative > 0) own.parent = relative - lowest;
  for (int bit = lowest >> 1; bit > 0; bit >>= 1) {
    if (relative + bit < size) own.children.push_back(relative + bit);
  }
  return own;
}

Neighbors InChain(int relative, int size) {
  Neighbors own;
  if (relative > 0) own.parent = relative - 1;
  if (relative + 1 < size) own.children.push_back(relative + 1);
  return own;
}

}  // namespace

// A rank forwards each piece as soon as it has arrived.
Status BroadcastLinks(Transport& transport, const BroadcastRoute& route, int root,
                      const std::byte* source, Bytes target, Deadline deadline,
                      const TakePiece& take) {
  const int size = transport.size();
  const int relative = (transport.rank() - root + size) % size;
  const auto rank_at = [&](int other) { return (other + root) % size; };
  const Neighbors own = route.chain ? InChain(relative, size) : InTree(relative, size);
  if (!own.parent) CopyBytes(target.data(), source, target.size());
  std::vector<Ticket> sends;
  const auto forward = [&](Bytes piece) -> Status {
    if (own.parent) {
      const Result<Ticket> posted = transport.PostReceive(rank_at(*own.parent), piece);
      SHVD_TRY(posted.status());
      SHVD_TRY(transport.Wait(Span<const Ticket>(&posted.value(), 1), deadline));
    }
    for (const int child : own.children) {
      const Result<Ticket> posted = transport.PostSend(rank_at(child), piece);
      SHVD_TRY(posted.status());
      sends.push_back(posted.value());
    }
    return take ? take(piece) : Status();
  };
  SHVD_TRY(ForEachPiece(target, route.piece_bytes, forward));
  return transport.Wait(Span<const Ticket>(sends.data(), sends.size()), deadline);
}

Status BroadcastShm(ArenaSteps& steps, int root, const std::byte* source, Bytes target,
                    Deadline deadline) {
  const bool is_root = steps.member() == root;
  if (is_root) CopyBytes(target.data(), source, target.size());
  return ForEachPiece(target, steps.PieceBytes(), [&](Bytes piece) -> Status {
    std::byte* slot = steps.StartRound().Slot(root);
    if (is_root) CopyBytes(slot, piece.data(), piece.size());
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    if (!is_root) CopyBytes(piece.data(), slot, piece.size());
    return Status();
  });
}

}  // namespace sparkhvd
