#include "collectives/allreduce_halving.h"

#include <string>

#include "collectives/exchange.h"
#include "collectives/players.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// The part of the data for the players from `begin` to before `end`.
Bytes PartOf(std::byte* data, size_t width, const std::vector<Slice>& slices, int begin, int end) {
  const size_t first = slices[static_cast<size_t>(begin)].begin;
  const Slice& last = slices[static_cast<size_t>(end - 1)];
  return Bytes(data + first * width, (last.begin + last.count - first) * width);
}

}  // namespace

// Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005). In each round of the first half,
// two players each give the other half of what they still reduce, until every player has the result
// of its slice. The rounds of the second half are those of the first one backwards, and gather the
// slices.
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
    const auto exchange = [&](int distance, Bytes out, Bytes in, const char* half) {
      const int peer = players.RankOf(number ^ distance);
      return Exchange(transport, peer, out, peer, in, deadline)
          .Annotate(std::string(half) + " distance " + std::to_string(distance));
    };
    // The part of the players that agree with this one in all digits above `distance`, or with the
    // partner, is what they have after the round of that distance.
    const auto part = [&](int player, int distance) {
      const int begin = player - player % distance;
      return PartOf(data, width, slices, begin, begin + distance);
    };
    for (int distance = players.count / 2; distance > 0; distance /= 2) {
      const Bytes kept = part(number, distance);
      const Bytes received(scratch.data(), kept.size());
      SHVD_TRY(exchange(distance, part(number ^ distance, distance), received, "allreduce, first"));
      Combine(reduction.dtype, reduction.op, kept.data(), kept.data(), received.data(),
              kept.size() / width);
    }
    const Slice own = slices[static_cast<size_t>(number)];
    Finish(reduction, ranks, data + own.begin * width, own.count);
    for (int distance = 1; distance < players.count; distance *= 2) {
      SHVD_TRY(exchange(distance, part(number, distance), part(number ^ distance, distance),
                        "allreduce, second"));
    }
    return Status();
  };
  return AmongPlayers(transport, reduction, whole, scratch.data(), deadline, rounds);
}

}  // namespace sparkhvd
