// Where a member stands in the use of its arena.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/arena.h"

namespace sparkhvd {

// One per arena, owned by whoever runs collectives over it. All members run the same collectives in
// the same order, so all count alike, and the count alone says which part of a region may be
// written.
//
// A region is used in `kSlots` slots. A collective works in rounds; a round starts after everybody
// was awaited at the step that is then current, makes one or two steps, and uses the slot that
// belongs to the step at which it starts. The next round may start one step later already. What a
// round leaves in the slot may be read until the reader arrives at the fourth step after the
// round's start. The slot comes up again at the earliest four steps after, when everybody has been
// awaited at the fourth: nobody reads what is overwritten, and no round has to wait for the readers
// of the one before.
class ArenaSteps {
 public:
  static constexpr uint64_t kSlots = 4;

  explicit ArenaSteps(Arena& arena) : arena_(arena) {}

  Arena& arena() const { return arena_; }
  int member() const { return arena_.member(); }
  int count() const { return arena_.count(); }

  size_t SlotBytes() const { return arena_.Region(arena_.member()).size() / kSlots; }

  // Everybody's slots of one round; stays good while the steps advance.
  class Round {
   public:
    Round(const Arena& arena, size_t offset) : arena_(&arena), offset_(offset) {}
    std::byte* Slot(int member) const { return arena_->Region(member).data() + offset_; }
    // The same slots without their first `bytes` bytes.
    Round Behind(size_t bytes) const { return Round(*arena_, offset_ + bytes); }

   private:
    const Arena* arena_;
    size_t offset_;
  };

  // The round that starts now.
  Round StartRound() const {
    return Round(arena_, static_cast<size_t>(step_ % kSlots) * SlotBytes());
  }

  // Ends a step: what this member wrote is visible to everybody who awaits it.
  void Arrive() { step_ = arena_.Arrive(); }

  // Waits for everybody at the step that this member ended last. After a kTimeout it may be called
  // again, by any thread.
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
