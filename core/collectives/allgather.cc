#include "collectives/allgather.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "collectives/exchange.h"

namespace sparkhvd {
namespace {

std::vector<size_t> Offsets(const std::vector<size_t>& lengths) {
  std::vector<size_t> offsets;
  offsets.reserve(lengths.size());
  size_t offset = 0;
  for (const size_t length : lengths) {
    offsets.push_back(offset);
    offset += length;
  }
  return offsets;
}

}  // namespace

// Each step sends to the right what the previous step received from the left. The first step sends
// this rank's own contribution.
Status AllgatherRing(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                     Bytes target, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const std::vector<size_t> offsets = Offsets(lengths);
  const auto view = [&](int owner) {
    const auto index = static_cast<size_t>((owner + 2 * size) % size);
    return target.Sub(offsets[index], lengths[index]);
  };
  CopyBytes(view(rank).data(), source.data(), source.size());
  for (int step = 0; step + 1 < size; ++step) {
    SHVD_TRY(Exchange(transport, (rank + 1) % size, view(rank - step), (rank + size - 1) % size,
                      view(rank - step - 1), deadline)
                 .Annotate("ring gather step " + std::to_string(step)));
  }
  return Status();
}

Status AllgatherShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                    Bytes target, Deadline deadline) {
  const std::vector<size_t> offsets = Offsets(lengths);
  const size_t longest = *std::max_element(lengths.begin(), lengths.end());
  const auto part = [&](size_t length, size_t done) {
    return length > done ? std::min(steps.SlotBytes(), length - done) : size_t{0};
  };
  for (size_t done = 0; done < longest; done += steps.SlotBytes()) {
    const ArenaSteps::Round round = steps.StartRound();
    CopyBytes(round.Slot(steps.member()), source.data() + done, part(source.size(), done));
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    for (int member = 0; member < steps.count(); ++member) {
      const auto index = static_cast<size_t>(member);
      CopyBytes(target.data() + offsets[index] + done, round.Slot(member),
                part(lengths[index], done));
    }
  }
  return Status();
}

}  // namespace sparkhvd
