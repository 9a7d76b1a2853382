// The ranks that take part in the rounds of a reduction. Their number must be a power of two.
#pragma once

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/kernels.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Of the first 2 * `extra` ranks, the odd ranks do not take part. Their left neighbors take part
// for them (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
// MPICH", 2005).
struct Participants {
  explicit constexpr Participants(int size) : count(PowerOfTwoUpTo(size)), extra(size - count) {}

  constexpr bool HasPartner(int rank) const { return rank < 2 * extra; }
  constexpr bool Participates(int rank) const { return !HasPartner(rank) || rank % 2 == 0; }
  constexpr int NumberOf(int rank) const { return HasPartner(rank) ? rank / 2 : rank - extra; }
  constexpr int RankOf(int number) const { return number < extra ? 2 * number : number + extra; }
  // Returns a participant's number with its bits in reverse order.
  constexpr int Reversed(int number) const {
    int reversed = 0;
    for (int bit = 1; bit < count; bit *= 2) {
      reversed = 2 * reversed + ((number & bit) != 0 ? 1 : 0);
    }
    return reversed;
  }

  const int count;
  const int extra;

 private:
  static constexpr int PowerOfTwoUpTo(int number) {
    int power = 1;
    while (power <= number / 2) power *= 2;
    return power;
  }
};

// Runs `rounds` on the ranks that take part, with the contributions of their partners in `data`.
// Afterwards, each of them sends `result` to its partner. On the other ranks, `result` is the
// memory that receives it. `scratch` has room for as many bytes as `data`.
template <typename Rounds>
Status RunAmongParticipants(Transport& transport, const Reduction& reduction, Bytes data,
                            Bytes result, std::byte* scratch, Deadline deadline,
                            const Rounds& rounds) {
  const Participants participants(transport.size());
  const int rank = transport.rank();
  const auto wait = [&](const Result<Ticket>& posted) {
    SHVD_TRY(posted.status());
    return transport.Wait(Span<const Ticket>(&posted.value(), 1), deadline);
  };
  if (!participants.Participates(rank)) {
    SHVD_TRY(wait(transport.PostSend(rank - 1, data)).Annotate("before the rounds"));
    return wait(transport.PostReceive(rank - 1, result)).Annotate("after the rounds");
  }
  if (!participants.HasPartner(rank)) return rounds(participants);
  SHVD_TRY(wait(transport.PostReceive(rank + 1, Bytes(scratch, data.size())))
               .Annotate("before the rounds"));
  Combine(reduction.dtype, reduction.op, data.data(), data.data(), scratch,
          data.size() / SizeOf(reduction.dtype));
  SHVD_TRY(rounds(participants));
  return wait(transport.PostSend(rank + 1, result)).Annotate("after the rounds");
}

}  // namespace sparkhvd
