#include "collectives/allreduce_shm.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/combine_slots.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

constexpr size_t kCacheLine = 64;

// Up to this many bytes from all members together everybody reduces everything: one step instead of
// two.
constexpr size_t kSmallBytes = size_t{32} << 10;

// What a round moves: its share of the source, the target and everybody's slot stay in the
// second-level cache.
constexpr size_t kChunkBytes = size_t{256} << 10;

// One step: write the own contribution, then read all of them.
Status AllreduceSmall(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, Deadline deadline) {
  const ArenaSteps::Round round = steps.StartRound();
  CopyPrescaled(reduction, round.Slot(steps.member()), source, count);
  SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
  CombineSlots(steps, round, reduction, target, Slice{0, count});
  return Status();
}

// Two steps: write the own contribution; combine the own slice of everybody's and show it; read the
// others' slices.
Status AllreduceChunk(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, Deadline deadline) {
  const size_t width = SizeOf(reduction.dtype);
  const int members = steps.count();
  const ArenaSteps::Round round = steps.StartRound();
  std::byte* own = round.Slot(steps.member());
  CopyPrescaled(reduction, own, source, count);
  SHVD_TRY(steps.ArriveAndAwaitAll(deadline));

  // The own contribution stands where the result will be shown, so the result is built in the
  // target first.
  const Slice mine = SliceOf(count, members, steps.member(), kCacheLine / width);
  if (mine.count > 0) {
    std::byte* result = target + mine.begin * width;
    CombineSlots(steps, round, reduction, result, mine);
    std::memcpy(own + mine.begin * width, result, mine.count * width);
  }
  SHVD_TRY(steps.ArriveAndAwaitAll(deadline));

  for (int distance = 1; distance < members; ++distance) {
    const int member = (steps.member() + distance) % members;
    const Slice theirs = SliceOf(count, members, member, kCacheLine / width);
    if (theirs.count == 0) continue;
    std::memcpy(target + theirs.begin * width, round.Slot(member) + theirs.begin * width,
                theirs.count * width);
  }
  return Status();
}

}  // namespace

size_t SmallAllreduceBytes(const ArenaSteps& steps) {
  return std::min(kSmallBytes / static_cast<size_t>(steps.count()), steps.SlotBytes());
}

Status AllreduceShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                    std::byte* target, size_t count, Deadline deadline) {
  const size_t width = SizeOf(reduction.dtype);
  if (count == 0) return Status();
  if (steps.count() == 1) {
    CopyPrescaled(reduction, target, source, count);
    Finish(reduction, 1, target, count);
    return Status();
  }
  if (count * width <= SmallAllreduceBytes(steps)) {
    return AllreduceSmall(steps, reduction, source, target, count, deadline);
  }
  const size_t chunk = std::min(steps.SlotBytes(), kChunkBytes) / width;
  for (size_t done = 0; done < count; done += chunk) {
    const size_t part = std::min(chunk, count - done);
    SHVD_TRY(AllreduceChunk(steps, reduction, source + done * width, target + done * width, part,
                            deadline)
                 .Annotate("element " + std::to_string(done) + " of " + std::to_string(count)));
  }
  return Status();
}

}  // namespace sparkhvd
