#include <algorithm>
#include <string>

#include "collectives/allreduce_links.h"
#include "collectives/exchange.h"
#include "collectives/players.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// The memory of `length` slices.
Bytes PartOf(std::byte* data, size_t width, const std::vector<Slice>& slices, int begin,
             int length) {
  const size_t first = slices[static_cast<size_t>(begin)].begin;
  const Slice& last = slices[static_cast<size_t>(begin + length - 1)];
  return Bytes(data + first * width, (last.begin + last.count - first) * width);
}

}  // namespace

// Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005). In each round of the first half,
// two players split the data that both still reduce, until every player has the result of its
// slice. The second half runs the same rounds in reverse order and gathers the slices. Neighbours,
// which are most likely on one host, exchange the most, and distant players the least.
Status AllreduceHalvingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                               std::byte* data, size_t count, std::vector<std::byte>& scratch,
                               Deadline deadline) {
  if (count == 0) return Status();
  const size_t width = SizeOf(reduction.dtype);
  const Bytes whole(data, count * width);
  if (scratch.size() < whole.size()) scratch.resize(whole.size());
  const auto rounds = [&](const Players& players) -> Status {
    const std::vector<Slice> slices = EvenSlices(count, players.count, kCacheLine / width);
    const int number = players.NumberOf(transport.rank());
    const auto exchange = [&](int distance, Bytes out, Bytes in) {
      const int peer = players.RankOf(number ^ distance);
      return Exchange(transport, peer, out, peer, in, deadline)
          .Annotate("allreduce distance " + std::to_string(distance));
    };
    int begin = 0;  // of the slices that this player still reduces, or has the results of
    int length = players.count;
    for (int distance = 1; distance < players.count; distance *= 2) {
      length /= 2;
      const int upper = begin + length;
      const bool keeps_upper = (number & distance) != 0;
      const Bytes given = PartOf(data, width, slices, keeps_upper ? begin : upper, length);
      if (keeps_upper) begin = upper;
      const Bytes kept = PartOf(data, width, slices, begin, length);
      SHVD_TRY(exchange(distance, given, Bytes(scratch.data(), kept.size())));
      Combine(reduction.dtype, reduction.op, kept.data(), kept.data(), scratch.data(),
              kept.size() / width);
    }
    const Bytes own = PartOf(data, width, slices, begin, 1);
    Finish(reduction, ranks, own.data(), own.size() / width);
    for (int distance = players.count / 2; distance > 0; distance /= 2) {
      const int other = (number & distance) != 0 ? begin - length : begin + length;
      SHVD_TRY(exchange(distance, PartOf(data, width, slices, begin, length),
                        PartOf(data, width, slices, other, length)));
      begin = std::min(begin, other);
      length *= 2;
    }
    return Status();
  };
  return AmongPlayers(transport, reduction, whole, scratch.data(), deadline, rounds);
}

}  // namespace sparkhvd
