#include "collectives/reducescatter.h"

#include <algorithm>

#include "base/copy.h"
#include "collectives/combine_slots.h"
#include "collectives/halving.h"
#include "collectives/kernels.h"
#include "collectives/participants.h"
#include "collectives/ring.h"
#include "collectives/select.h"

namespace sparkhvd {
namespace {

// Returns the elements that a participant reduces: its own, and its partner's behind them.
Slice SharedSlice(const Participants& participants, const std::vector<Slice>& slices, int number) {
  const int rank = participants.RankOf(number);
  const Slice& first = slices[static_cast<size_t>(rank)];
  const Slice& last = slices[static_cast<size_t>(participants.HasPartner(rank) ? rank + 1 : rank)];
  return Slice{first.begin, last.begin + last.count - first.begin};
}

}  // namespace

Status ReducescatterLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                          std::byte* target, const std::vector<Slice>& slices,
                          std::vector<std::byte>& scratch, Deadline deadline) {
  const size_t count = slices.back().begin + slices.back().count;
  const size_t bytes = count * SizeOf(reduction.dtype);
  return (ScattersByHalving(transport.size(), bytes, transport.costs())
              ? ReducescatterHalving
              : ReducescatterRing)(transport, reduction, source, target, slices, scratch, deadline);
}

// The first half of the ring allreduce. It works on a copy, because partial results need memory.
Status ReducescatterRing(Transport& transport, const Reduction& reduction, const std::byte* source,
                         std::byte* target, const std::vector<Slice>& slices,
                         std::vector<std::byte>& scratch, Deadline deadline) {
  const size_t width = SizeOf(reduction.dtype);
  const Slice own = slices[static_cast<size_t>(transport.rank())];
  if (transport.size() == 1) {
    CopyPrescaled(reduction, target, source, own.count);
  } else {
    const size_t count = slices.back().begin + slices.back().count;
    std::vector<std::byte> partial(count * width);
    CopyPrescaled(reduction, partial.data(), source, count);
    SHVD_TRY(
        RingReduceScatter(Ring{transport, reduction, partial.data(), slices, deadline}, scratch));
    CopyBytes(target, partial.data() + own.begin * width, own.count * width);
  }
  Finish(reduction, transport.size(), target, own.count);
  return Status();
}

// The first half of Rabenseifner's allreduce. It works on a copy, in the order in which the
// participants complete their slices.
Status ReducescatterHalving(Transport& transport, const Reduction& reduction,
                            const std::byte* source, std::byte* target,
                            const std::vector<Slice>& slices, std::vector<std::byte>& scratch,
                            Deadline deadline) {
  const size_t width = SizeOf(reduction.dtype);
  const size_t bytes = (slices.back().begin + slices.back().count) * width;
  if (bytes == 0) return Status();
  if (scratch.size() < bytes) scratch.resize(bytes);
  std::vector<std::byte> partial(bytes);
  const Participants participants(transport.size());
  std::vector<Slice> ordered;
  size_t begin = 0;
  for (int index = 0; index < participants.count; ++index) {
    const Slice part = SharedSlice(participants, slices, participants.Reversed(index));
    CopyPrescaled(reduction, partial.data() + begin * width, source + part.begin * width,
                  part.count);
    ordered.push_back(Slice{begin, part.count});
    begin += part.count;
  }
  const Halving halving{transport, reduction, participants, partial.data(), ordered, deadline};
  const Bytes shared = halving.View(participants.Reversed(halving.number()), 1);
  const size_t own = slices[static_cast<size_t>(transport.rank())].count * width;
  const auto rounds = [&](const Participants&) -> Status {
    SHVD_TRY(HalvingReduceScatter(halving, scratch.data()));
    Finish(reduction, transport.size(), shared.data(), shared.size() / width);
    CopyBytes(target, shared.data(), own);
    return Status();
  };
  const Bytes result = participants.Participates(transport.rank())
                           ? shared.Sub(own, shared.size() - own)
                           : Bytes(target, own);
  return RunAmongParticipants(transport, reduction, Bytes(partial.data(), bytes), result,
                              scratch.data(), deadline, rounds);
}

// Every round publishes a piece of each slice, and the slice's owner combines it directly into the
// target.
Status ReducescatterShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                        std::byte* target, const std::vector<Slice>& slices, Deadline deadline) {
  const size_t width = SizeOf(reduction.dtype);
  const size_t own = slices[static_cast<size_t>(steps.member())].count;
  if (steps.count() == 1) {
    CopyPrescaled(reduction, target, source, own);
    Finish(reduction, 1, target, own);
    return Status();
  }
  size_t longest = 0;
  for (const Slice& slice : slices) longest = std::max(longest, slice.count);
  const size_t piece = steps.PieceBytes() / width / slices.size();
  const auto length = [&](size_t count, size_t done) {
    return count > done ? std::min(piece, count - done) : size_t{0};
  };
  for (size_t done = 0; done < longest; done += piece) {
    const ArenaSteps::Round round = steps.StartRound();
    std::byte* slot = round.Slot(steps.member());
    for (size_t owner = 0; owner < slices.size(); ++owner) {
      CopyPrescaled(reduction, slot + owner * piece * width,
                    source + (slices[owner].begin + done) * width,
                    length(slices[owner].count, done));
    }
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    const size_t begin = static_cast<size_t>(steps.member()) * piece;
    CombineSlots(steps, round, reduction, target + done * width, Slice{begin, length(own, done)});
  }
  return Status();
}

}  // namespace sparkhvd
