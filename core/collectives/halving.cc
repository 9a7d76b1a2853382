#include "collectives/halving.h"

#include <algorithm>
#include <string>

#include "collectives/exchange.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

// Sends to the participant whose number differs in the bit `distance`, and receives from it.
Status ExchangeAt(const Halving& halving, int distance, ConstBytes out, Bytes in) {
  const int peer = halving.participants.RankOf(halving.number() ^ distance);
  return Exchange(halving.transport, peer, out, peer, in, halving.deadline)
      .Annotate("halving distance " + std::to_string(distance));
}

}  // namespace

// In each round, two participants split the data that both still reduce. Neighbors exchange the
// most data, because they are most likely on the same host. So the lowest bit of a number decides
// about halves of the data, and the highest bit about single slices.
Status HalvingReduceScatter(const Halving& halving, std::byte* received) {
  const Reduction& reduction = halving.reduction;
  int begin = 0;  // the first slice that this rank still reduces
  int length = halving.participants.count;
  for (int distance = 1; distance < halving.participants.count; distance *= 2) {
    length /= 2;
    const int upper = begin + length;
    const bool keeps_upper = (halving.number() & distance) != 0;
    const Bytes sent = halving.View(keeps_upper ? begin : upper, length);
    if (keeps_upper) begin = upper;
    const Bytes kept = halving.View(begin, length);
    SHVD_TRY(ExchangeAt(halving, distance, sent, Bytes(received, kept.size())));
    Combine(reduction.dtype, reduction.op, kept.data(), kept.data(), received,
            kept.size() / halving.width());
  }
  return Status();
}

// The rounds of HalvingReduceScatter in reverse order.
Status HalvingGather(const Halving& halving) {
  int begin = halving.participants.Reversed(halving.number());  // the first complete slice
  int length = 1;
  for (int distance = halving.participants.count / 2; distance > 0; distance /= 2) {
    const int other = (halving.number() & distance) != 0 ? begin - length : begin + length;
    SHVD_TRY(
        ExchangeAt(halving, distance, halving.View(begin, length), halving.View(other, length)));
    begin = std::min(begin, other);
    length *= 2;
  }
  return Status();
}

}  // namespace sparkhvd
