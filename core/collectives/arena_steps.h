// Tracks a member's progress through the steps of its arena.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/arena.h"

namespace sparkhvd {

// Each arena has one ArenaSteps, which the arena's user owns. All members run the same collectives
// in the same order, so their counts agree, and the count alone decides which part of a region may
// be written.
//
// A region is divided into `kSlots` slots. A collective works in rounds. A round starts after an
// AwaitAll at the current step, makes one or two steps, and uses the slot of the step at which it
// starts. The next round may start one step later. A reader may read a slot until it arrives at the
// fourth step after the round's start. The slot is reused four steps later at the earliest, after
// an AwaitAll at the fourth step. So no data is overwritten before it is read, and no round has to
// wait for the readers of the previous one.
class ArenaSteps {
 public:
  static constexpr uint64_t kSlots = 4;

  explicit ArenaSteps(Arena& arena) : arena_(arena) {}

  Arena& arena() const { return arena_; }
  int member() const { return arena_.member(); }
  int count() const { return arena_.count(); }

  size_t SlotBytes() const { return arena_.Region(arena_.member()).size() / kSlots; }

  // Returns the most bytes of long data that one round should publish. They stay in the
  // second-level cache until the others have read them, and the others read them while the next
  // bytes are written.
  size_t PieceBytes() const { return std::min(SlotBytes(), size_t{256} << 10); }

  // The slots of all members in one round. A Round stays valid while the steps advance.
  class Round {
   public:
    Round(const Arena& arena, size_t offset) : arena_(&arena), offset_(offset) {}
    std::byte* Slot(int member) const { return arena_->Region(member).data() + offset_; }
    // Returns the same slots without their first `bytes` bytes.
    Round Behind(size_t bytes) const { return Round(*arena_, offset_ + bytes); }

   private:
    const Arena* arena_;
    size_t offset_;
  };

  // Returns the round that starts now.
  Round StartRound() const {
    return Round(arena_, static_cast<size_t>(step_ % kSlots) * SlotBytes());
  }

  // Ends a step: members that await it see everything that this member has written.
  void Arrive() { step_ = arena_.Arrive(); }

  // Waits for all members at the step that this member ended last. After a kTimeout, any thread may
  // call it again.
  Status AwaitAll(Deadline deadline) { return arena_.AwaitAll(step_, deadline); }

  Status ArriveAndAwaitAll(Deadline deadline) {
    Arrive();
    return AwaitAll(deadline);
  }

 private:
  Arena& arena_;
  uint64_t step_ = 0;
};

}  // namespace sparkhvd
