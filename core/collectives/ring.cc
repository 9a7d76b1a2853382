#include "collectives/ring.h"

#include <algorithm>
#include <string>

#include "collectives/exchange.h"
#include "collectives/kernels.h"
#include "collectives/select.h"

namespace sparkhvd {
namespace {

// Receives a slice piece by piece. Combines each piece with this rank's data while the next one
// arrives.
Status ReceiveAndCombine(const Ring& ring, Slice slice, std::vector<std::byte>& scratch) {
  const Bytes own = ring.View(slice);
  const size_t piece = std::max(kRingPieceBytes / ring.width(), size_t{1}) * ring.width();
  const int from = ring.Neighbor(-1);
  const size_t pieces = (own.size() + piece - 1) / piece;
  const auto length = [&](size_t index) { return std::min(piece, own.size() - index * piece); };
  const auto post = [&](size_t index) {
    return ring.transport.PostReceive(from,
                                      Bytes(scratch.data() + (index % 2) * piece, length(index)));
  };
  if (scratch.size() < 2 * piece) scratch.resize(2 * piece);
  Ticket current = 0;
  for (size_t index = 0; index < pieces; ++index) {
    if (index == 0) {
      const Result<Ticket> posted = post(0);
      SHVD_TRY(posted.status());
      current = posted.value();
    }
    Ticket following = 0;
    if (index + 1 < pieces) {
      const Result<Ticket> posted = post(index + 1);
      SHVD_TRY(posted.status());
      following = posted.value();
    }
    SHVD_TRY(ring.transport.Wait(Span<const Ticket>(&current, 1), ring.deadline));
    std::byte* part = own.data() + index * piece;
    Combine(ring.reduction.dtype, ring.reduction.op, part, scratch.data() + (index % 2) * piece,
            part, length(index) / ring.width());
    current = following;
  }
  return Status();
}

// Sends a slice in the pieces that ReceiveAndCombine expects.
Status PostPieces(const Ring& ring, Slice slice, std::vector<Ticket>& tickets) {
  const ConstBytes bytes = ring.View(slice);
  const size_t piece = std::max(kRingPieceBytes / ring.width(), size_t{1}) * ring.width();
  for (size_t done = 0; done < bytes.size(); done += piece) {
    const Result<Ticket> posted = ring.transport.PostSend(
        ring.Neighbor(1), bytes.Sub(done, std::min(piece, bytes.size() - done)));
    SHVD_TRY(posted.status());
    tickets.push_back(posted.value());
  }
  return Status();
}

std::string StepName(const char* half, int step) {
  return std::string("ring ") + half + " step " + std::to_string(step);
}

}  // namespace

// After step s, a rank has combined s + 2 contributions to one slice. After the last step, its own
// slice is complete.
Status RingReduceScatter(const Ring& ring, std::vector<std::byte>& scratch) {
  std::vector<Ticket> sends;
  for (int step = 0; step + 1 < ring.size(); ++step) {
    sends.clear();
    const std::string name = StepName("reduce", step);
    SHVD_TRY(PostPieces(ring, ring.SliceAt(-step - 1), sends).Annotate(name));
    SHVD_TRY(ReceiveAndCombine(ring, ring.SliceAt(-step - 2), scratch).Annotate(name));
    SHVD_TRY(ring.transport.Wait(Span<const Ticket>(sends.data(), sends.size()), ring.deadline)
                 .Annotate(name));
  }
  return Status();
}

Status RingGather(const Ring& ring) {
  for (int step = 0; step + 1 < ring.size(); ++step) {
    SHVD_TRY(Exchange(ring.transport, ring.Neighbor(1), ring.View(ring.SliceAt(-step)),
                      ring.Neighbor(-1), ring.View(ring.SliceAt(-step - 1)), ring.deadline)
                 .Annotate(StepName("gather", step)));
  }
  return Status();
}

}  // namespace sparkhvd
