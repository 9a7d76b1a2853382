#include "collectives/allreduce_ring.h"

#include <algorithm>
#include <string>

#include "collectives/exchange.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

constexpr size_t kCacheLine = 64;

// The pieces in which a slice travels during the reduction: while one is combined, still in the
// cache, the next arrives.
constexpr size_t kPieceBytes = size_t{256} << 10;

struct Ring {
  Transport& transport;
  const Reduction& reduction;
  std::byte* data;
  size_t count;
  Deadline deadline;

  int size() const { return transport.size(); }
  int Neighbour(int distance) const { return (transport.rank() + distance + size()) % size(); }
  // The slice that is `distance` places after the own one.
  Slice SliceAt(int distance) const {
    return SliceOf(count, size(), Neighbour(distance), kCacheLine / width());
  }
  size_t width() const { return SizeOf(reduction.dtype); }
  Bytes View(Slice slice) const {
    return Bytes(data + slice.begin * width(), slice.count * width());
  }
};

// Receives a slice piece by piece and combines each with the own data while the next is on its way.
Status ReceiveAndCombine(const Ring& ring, Slice slice, std::vector<std::byte>& scratch) {
  const Bytes own = ring.View(slice);
  const size_t piece = std::max(kPieceBytes / ring.width(), size_t{1}) * ring.width();
  const int from = ring.Neighbour(-1);
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

// Sends a slice in the pieces in which ReceiveAndCombine takes it.
Status PostPieces(const Ring& ring, Slice slice, std::vector<Ticket>& tickets) {
  const ConstBytes bytes = ring.View(slice);
  const size_t piece = std::max(kPieceBytes / ring.width(), size_t{1}) * ring.width();
  for (size_t done = 0; done < bytes.size(); done += piece) {
    const Result<Ticket> posted = ring.transport.PostSend(
        ring.Neighbour(1), bytes.Sub(done, std::min(piece, bytes.size() - done)));
    SHVD_TRY(posted.status());
    tickets.push_back(posted.value());
  }
  return Status();
}

std::string StepName(const char* half, int step) {
  return std::string("ring ") + half + " step " + std::to_string(step);
}

// After step s a rank has combined s + 2 contributions to one slice; after the last one its own
// slice is complete.
Status ReduceScatter(const Ring& ring, std::vector<std::byte>& scratch) {
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

Status Gather(const Ring& ring) {
  for (int step = 0; step + 1 < ring.size(); ++step) {
    SHVD_TRY(Exchange(ring.transport, ring.Neighbour(1), ring.View(ring.SliceAt(-step)),
                      ring.Neighbour(-1), ring.View(ring.SliceAt(-step - 1)), ring.deadline)
                 .Annotate(StepName("gather", step)));
  }
  return Status();
}

}  // namespace

// The ring algorithm (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009): the data is cut into one slice per rank; N - 1 steps pass partial results
// to the right until every rank holds the complete result of its slice, N - 1 more steps pass the
// results around.
Status AllreduceRing(Transport& transport, const Reduction& reduction, const std::byte* source,
                     std::byte* target, size_t count, std::vector<std::byte>& scratch,
                     Deadline deadline) {
  CopyPrescaled(reduction, target, source, count);
  if (count == 0) return Status();
  const Ring ring{transport, reduction, target, count, deadline};
  if (transport.size() > 1) SHVD_TRY(ReduceScatter(ring, scratch));
  const Slice own = ring.SliceAt(0);
  Finish(reduction, transport.size(), target + own.begin * ring.width(), own.count);
  if (transport.size() > 1) SHVD_TRY(Gather(ring));
  return Status();
}

}  // namespace sparkhvd
