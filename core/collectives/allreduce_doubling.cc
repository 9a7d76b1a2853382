#include "collectives/allreduce_doubling.h"

#include <string>

#include "collectives/exchange.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

int PowerOfTwoUpTo(int number) {
  int power = 1;
  while (power <= number / 2) power *= 2;
  return power;
}

// The ranks that take part in the rounds. Their number is a power of two. The odd ones of the first
// 2 * `extra` ranks do not take part; their left neighbours do so for them.
struct Players {
  explicit Players(int size) : count(PowerOfTwoUpTo(size)), extra(size - count) {}

  bool HasPartner(int rank) const { return rank < 2 * extra; }
  bool Plays(int rank) const { return !HasPartner(rank) || rank % 2 == 0; }
  int NumberOf(int rank) const { return HasPartner(rank) ? rank / 2 : rank - extra; }
  int RankOf(int number) const { return number < extra ? 2 * number : number + extra; }

  const int count;
  const int extra;
};

Status Send(Transport& transport, int peer, ConstBytes data, Deadline deadline) {
  const Result<Ticket> ticket = transport.PostSend(peer, data);
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), deadline);
}

Status Receive(Transport& transport, int peer, Bytes data, Deadline deadline) {
  const Result<Ticket> ticket = transport.PostReceive(peer, data);
  SHVD_TRY(ticket.status());
  return transport.Wait(Span<const Ticket>(&ticket.value(), 1), deadline);
}

}  // namespace

// Recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
// operations in MPICH", 2005). Both partners combine in the order of their numbers, so that all
// ranks get the same bits, also of NaN.
Status AllreduceDoublingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                                std::byte* data, size_t count, std::vector<std::byte>& scratch,
                                Deadline deadline) {
  if (count == 0) return Status();
  const Players players(transport.size());
  const int rank = transport.rank();
  const size_t length = count * SizeOf(reduction.dtype);
  const Bytes own(data, length);
  if (!players.Plays(rank)) {
    SHVD_TRY(Send(transport, rank - 1, own, deadline).Annotate("allreduce, before the rounds"));
    return Receive(transport, rank - 1, own, deadline).Annotate("allreduce, after the rounds");
  }
  if (scratch.size() < length) scratch.resize(length);
  std::byte* const received = scratch.data();
  if (players.HasPartner(rank)) {
    SHVD_TRY(Receive(transport, rank + 1, Bytes(received, length), deadline)
                 .Annotate("allreduce, before the rounds"));
    Combine(reduction.dtype, reduction.op, data, data, received, count);
  }
  const int number = players.NumberOf(rank);
  for (int distance = 1; distance < players.count; distance *= 2) {
    const int partner = number ^ distance;
    const int peer = players.RankOf(partner);
    SHVD_TRY(Exchange(transport, peer, own, peer, Bytes(received, length), deadline)
                 .Annotate("allreduce distance " + std::to_string(distance)));
    const bool first = number < partner;
    Combine(reduction.dtype, reduction.op, data, first ? data : received, first ? received : data,
            count);
  }
  Finish(reduction, ranks, data, count);
  if (!players.HasPartner(rank)) return Status();
  return Send(transport, rank + 1, own, deadline).Annotate("allreduce, after the rounds");
}

}  // namespace sparkhvd
