#include "collectives/allreduce_shm.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/copy.h"
#include "collectives/combine_slots.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

constexpr size_t kBlockBytes = size_t{8} << 10;

// One step: write this member's contribution, then read all of them.
Status AllreduceSmall(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                      std::byte* target, size_t count, Deadline deadline) {
  const ArenaSteps::Round round = steps.StartRound();
  CopyPrescaled(reduction, round.Slot(steps.member()), source, count);
  SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
  CombineSlots(steps, round, reduction, target, Slice{0, count});
  return Status();
}

// Larger buffers are reduced in chunks. A chunk has three stages with a step between them: publish
// the slices of the other members; combine this member's slice of all contributions and publish the
// result; copy the others' results. The stages of consecutive chunks overlap, so each chunk costs
// one step, and members of about equal speed never wait.
class Pipeline {
 public:
  Pipeline(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
           std::byte* target, size_t count, size_t chunk_bytes)
      : steps_(steps),
        reduction_(reduction),
        width_(SizeOf(reduction.dtype)),
        source_(source),
        target_(target),
        count_(count),
        chunk_(std::max(std::min(steps.SlotBytes(), chunk_bytes) / width_, size_t{1})) {}

  Status Run(Deadline deadline) {
    const size_t chunks = (count_ + chunk_ - 1) / chunk_;
    std::array<ArenaSteps::Round, 3> rounds{steps_.StartRound(), steps_.StartRound(),
                                            steps_.StartRound()};
    for (size_t now = 0; now < chunks + 2; ++now) {
      if (now < chunks) {
        rounds[now % 3] = steps_.StartRound();
        Show(now, rounds[now % 3]);
      }
      if (now >= 1 && now <= chunks) CombineOwn(now - 1, rounds[(now - 1) % 3]);
      // This copy follows the arrival, because no member waits for it. It still ends before the
      // next step, as ArenaSteps requires.
      if (now <= chunks) steps_.Arrive();
      if (now >= 2) Take(now - 2, rounds[(now - 2) % 3]);
      if (now > chunks) continue;
      if (const Status status = steps_.AwaitAll(deadline); !status.ok()) {
        return status.Annotate("element " + std::to_string(std::min(Begin(now), count_)) + " of " +
                               std::to_string(count_));
      }
    }
    return Status();
  }

 private:
  size_t Begin(size_t index) const { return index * chunk_; }
  size_t Length(size_t index) const { return std::min(chunk_, count_ - Begin(index)); }
  Slice SliceOfMember(size_t index, int member) const {
    return SliceOf(Length(index), steps_.count(), member, kCacheLine / width_);
  }

  void Show(size_t index, const ArenaSteps::Round& round) const {
    std::byte* slot = round.Slot(steps_.member());
    const std::byte* source = source_ + Begin(index) * width_;
    for (int member = 0; member < steps_.count(); ++member) {
      if (member == steps_.member()) continue;
      const Slice theirs = SliceOfMember(index, member);
      const size_t offset = theirs.begin * width_;
      CopyPrescaled(reduction_, slot + offset, source + offset, theirs.count);
    }
  }

  // Works block by block, so that the output of one kernel is still in the first-level cache for
  // the next. Reads this member's contribution from its source and builds the result in the slot.
  void CombineOwn(size_t index, const ArenaSteps::Round& round) const {
    const Slice mine = SliceOfMember(index, steps_.member());
    const size_t block = kBlockBytes / width_;
    alignas(kCacheLine) std::array<std::byte, kBlockBytes> scaled;
    for (size_t done = 0; done < mine.count; done += block) {
      const size_t count = std::min(block, mine.count - done);
      const size_t offset = (mine.begin + done) * width_;
      const std::byte* own = source_ + Begin(index) * width_ + offset;
      if (reduction_.prescale != 1.0) {
        CopyPrescaled(reduction_, scaled.data(), own, count);
        own = scaled.data();
      }
      const auto contribution = [&](int member) -> const std::byte* {
        return member == steps_.member() ? own : round.Slot(member) + offset;
      };
      std::byte* result = round.Slot(steps_.member()) + offset;
      // Combines in member order, so that a sum does not depend on the owner of the slice.
      Combine(reduction_.dtype, reduction_.op, result, contribution(0), contribution(1), count);
      for (int member = 2; member < steps_.count(); ++member) {
        Combine(reduction_.dtype, reduction_.op, result, result, contribution(member), count);
      }
      Finish(reduction_, steps_.count(), result, count);
      CopyBytes(target_ + Begin(index) * width_ + offset, result, count * width_);
    }
  }

  void Take(size_t index, const ArenaSteps::Round& round) const {
    std::byte* target = target_ + Begin(index) * width_;
    for (int distance = 1; distance < steps_.count(); ++distance) {
      const int member = (steps_.member() + distance) % steps_.count();
      const Slice theirs = SliceOfMember(index, member);
      const size_t offset = theirs.begin * width_;
      if (theirs.count == 0) continue;
      CopyBytes(target + offset, round.Slot(member) + offset, theirs.count * width_);
    }
  }

  ArenaSteps& steps_;
  const Reduction& reduction_;
  const size_t width_;
  const std::byte* const source_;
  std::byte* const target_;
  const size_t count_;
  const size_t chunk_;
};

}  // namespace

size_t SmallAllreduceBytes(const ArenaSteps& steps, const ArenaSwitches& switches) {
  return std::min(switches.small_bytes / static_cast<size_t>(steps.count()), steps.SlotBytes());
}

Status AllreduceShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                    std::byte* target, size_t count, Deadline deadline,
                    const ArenaSwitches& switches) {
  const size_t width = SizeOf(reduction.dtype);
  if (count == 0) return Status();
  if (steps.count() == 1) {
    CopyPrescaled(reduction, target, source, count);
    Finish(reduction, 1, target, count);
    return Status();
  }
  if (count * width <= SmallAllreduceBytes(steps, switches)) {
    return AllreduceSmall(steps, reduction, source, target, count, deadline);
  }
  return Pipeline(steps, reduction, source, target, count, switches.chunk_bytes).Run(deadline);
}

}  // namespace sparkhvd
