#include "collectives/reducescatter.h"

#include <algorithm>

#include "base/copy.h"
#include "collectives/combine_slots.h"
#include "collectives/kernels.h"
#include "collectives/ring.h"

namespace sparkhvd {
namespace {

// The data of one arena round stays in the second-level cache.
constexpr size_t kChunkBytes = size_t{256} << 10;

}  // namespace

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
  const size_t piece = std::min(steps.SlotBytes(), kChunkBytes) / width / slices.size();
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
