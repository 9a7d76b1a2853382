#include "scheduler/direct_calls.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/default_arithmetic.h"
#include "base/spin.h"
#include "collectives/allreduce_shm.h"
#include "collectives/combine_slots.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

constexpr std::chrono::milliseconds kInterruptInterval(100);

// A rank's call, at the start of its slot. If the data is small, it follows the call in the slot.
struct Call {
  uint64_t count;
  uint32_t dtype;
  uint32_t op;
};
constexpr size_t kCallBytes = 64;  // keeps the data on separate cache lines

std::string ToText(const Call& call) {
  return std::string(Name(static_cast<ReduceOp>(call.op))) + " of " + std::to_string(call.count) +
         " x " + Name(static_cast<DType>(call.dtype));
}

// Every rank compares all calls with the call of rank 0, so all ranks reach the same result.
Status CompareCalls(const ArenaSteps& steps, const ArenaSteps::Round& round) {
  Call first;
  std::memcpy(&first, round.Slot(0), sizeof(first));
  for (int member = 1; member < steps.count(); ++member) {
    if (std::memcmp(round.Slot(member), round.Slot(0), sizeof(first)) == 0) continue;
    Call other;
    std::memcpy(&other, round.Slot(member), sizeof(other));
    return Status(StatusCode::kMismatch, "rank 0 calls " + ToText(first) + ", rank " +
                                             std::to_string(member) + " calls " + ToText(other));
  }
  return Status();
}

}  // namespace

Status DirectCalls::Allreduce(const Reduction& reduction, const std::byte* source,
                              std::byte* target, size_t count, Deadline deadline,
                              const std::function<bool()>& interrupted) {
  const DefaultArithmetic arithmetic;
  const SpinsLong spins;
  const size_t bytes = count * SizeOf(reduction.dtype);
  const bool small = bytes <= SmallAllreduceBytes(steps_);
  const ArenaSteps::Round round = steps_.StartRound();
  const Call call{count, static_cast<uint32_t>(reduction.dtype),
                  static_cast<uint32_t>(reduction.op)};
  std::byte* slot = round.Slot(steps_.member());
  std::memcpy(slot, &call, sizeof(call));
  if (small) CopyPrescaled(reduction, slot + kCallBytes, source, count);
  SHVD_TRY(AwaitCalls(deadline, interrupted));
  SHVD_TRY(CompareCalls(steps_, round));
  if (!small) return AllreduceShm(steps_, reduction, source, target, count, deadline);
  CombineSlots(steps_, round.Behind(kCallBytes), reduction, target, Slice{0, count});
  return Status();
}

Status DirectCalls::AwaitCalls(Deadline deadline, const std::function<bool()>& interrupted) {
  steps_.Arrive();
  while (true) {
    const Deadline slice = Deadline::Earlier(deadline, Deadline::After(kInterruptInterval));
    const Status status = steps_.AwaitAll(slice);
    if (status.code() != StatusCode::kTimeout || !slice.Expired() || deadline.Expired()) {
      return status;
    }
    if (interrupted())
      return Status(StatusCode::kAborted, "interrupted while waiting for the other ranks");
  }
}

}  // namespace sparkhvd
