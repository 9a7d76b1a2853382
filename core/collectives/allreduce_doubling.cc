#include <string>

#include "collectives/allreduce_links.h"
#include "collectives/exchange.h"
#include "collectives/participants.h"

namespace sparkhvd {

// Recursive doubling (Thakur, Rabenseifner and Gropp 2005). Both partners combine in the order of
// their numbers, so that all ranks get bitwise identical results, even for NaN.
Status AllreduceDoublingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                                std::byte* data, size_t count, std::vector<std::byte>& scratch,
                                Deadline deadline) {
  if (count == 0) return Status();
  const Bytes own(data, count * SizeOf(reduction.dtype));
  if (scratch.size() < own.size()) scratch.resize(own.size());
  std::byte* const received = scratch.data();
  const auto rounds = [&](const Participants& participants) -> Status {
    const int number = participants.NumberOf(transport.rank());
    for (int distance = 1; distance < participants.count; distance *= 2) {
      const int partner = number ^ distance;
      const int peer = participants.RankOf(partner);
      SHVD_TRY(Exchange(transport, peer, own, peer, Bytes(received, own.size()), deadline)
                   .Annotate("doubling distance " + std::to_string(distance)));
      const bool first = number < partner;
      Combine(reduction.dtype, reduction.op, data, first ? data : received, first ? received : data,
              count);
    }
    Finish(reduction, ranks, data, count);
    return Status();
  };
  return RunAmongParticipants(transport, reduction, own, own, received, deadline, rounds);
}

}  // namespace sparkhvd
