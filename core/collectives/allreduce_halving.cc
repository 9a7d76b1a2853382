#include <algorithm>
#include <string>

#include "collectives/allreduce_links.h"
#include "collectives/exchange.h"
#include "collectives/participants.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// Returns the memory of `length` slices, from slice `begin` on.
Bytes PartOf(std::byte* data, size_t width, const std::vector<Slice>& slices, int begin,
             int length) {
  const size_t first = slices[static_cast<size_t>(begin)].begin;
  const Slice& last = slices[static_cast<size_t>(begin + length - 1)];
  return Bytes(data + first * width, (last.begin + last.count - first) * width);
}

}  // namespace

// Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005). In each round of the first half,
// two participants split the data that both still reduce, until every participant has the result of
// its slice. The second half runs the same rounds in reverse order and gathers the slices.
// Neighbors exchange the most data, because they are most likely on the same host.
Status AllreduceHalvingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                               std::byte* data, size_t count, std::vector<std::byte>& scratch,
                               Deadline deadline) {
  if (count == 0) return Status();
  const size_t width = SizeOf(reduction.dtype);
  const Bytes whole(data, count * width);
  if (scratch.size() < whole.size()) scratch.resize(whole.size());
  const auto rounds = [&](const Participants& participants) -> Status {
    const std::vector<Slice> slices = EvenSlices(count, participants.count, kCacheLine / width);
    const int number = participants.NumberOf(transport.rank());
    const auto exchange = [&](int distance, Bytes out, Bytes in) {
      const int peer = participants.RankOf(number ^ distance);
      return Exchange(transport, peer, out, peer, in, deadline)
          .Annotate("allreduce distance " + std::to_string(distance));
    };
    int begin = 0;  // the first slice that this rank still reduces, or has the result of
    int length = participants.count;
    for (int distance = 1; distance < participants.count; distance *= 2) {
      length /= 2;
      const int upper = begin + length;
      const bool keeps_upper = (number & distance) != 0;
      const Bytes sent = PartOf(data, width, slices, keeps_upper ? begin : upper, length);
      if (keeps_upper) begin = upper;
      const Bytes kept = PartOf(data, width, slices, begin, length);
      SHVD_TRY(exchange(distance, sent, Bytes(scratch.data(), kept.size())));
      Combine(reduction.dtype, reduction.op, kept.data(), kept.data(), scratch.data(),
              kept.size() / width);
    }
    const Bytes own = PartOf(data, width, slices, begin, 1);
    Finish(reduction, ranks, own.data(), own.size() / width);
    for (int distance = participants.count / 2; distance > 0; distance /= 2) {
      const int other = (number & distance) != 0 ? begin - length : begin + length;
      SHVD_TRY(exchange(distance, PartOf(data, width, slices, begin, length),
                        PartOf(data, width, slices, other, length)));
      begin = std::min(begin, other);
      length *= 2;
    }
    return Status();
  };
  return RunAmongParticipants(transport, reduction, whole, scratch.data(), deadline, rounds);
}

}  // namespace sparkhvd
