#include "collectives/allgather.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "collectives/exchange.h"
#include "collectives/select.h"

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

// The algorithm of Bruck, Ho, Kipnis, Upfal and Weathersby ("Efficient algorithms for all-to-all
// communications in multiport message-passing systems", 1997). After the round of a distance, a
// rank holds the contributions of twice as many ranks, beginning with its own and ascending.
Status AllgatherDoubling(Transport& transport, ConstBytes source,
                         const std::vector<size_t>& lengths, Bytes target, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const std::vector<size_t> offsets = Offsets(lengths);
  CopyBytes(target.data() + offsets[static_cast<size_t>(rank)], source.data(), source.size());
  const auto between = [&](int begin, int end) {
    const size_t first = begin < size ? offsets[static_cast<size_t>(begin)] : target.size();
    const size_t last = end < size ? offsets[static_cast<size_t>(end)] : target.size();
    return target.Sub(first, last - first);
  };
  // Calls `post` for the one or two pieces of memory that hold the contributions of `count` ranks.
  const auto for_each_piece = [&](int begin, int count, const auto& post) -> Status {
    const int end = begin + count;
    const int wrapped = std::max(end - size, 0);
    for (const Bytes piece : {between(begin, std::min(end, size)), between(0, wrapped)}) {
      if (!piece.empty()) SHVD_TRY(post(piece));
    }
    return Status();
  };
  for (int distance = 1; distance < size; distance *= 2) {
    const int count = std::min(distance, size - distance);
    const int to = (rank + size - distance) % size;
    const int from = (rank + distance) % size;
    std::vector<Ticket> tickets;
    const auto add = [&tickets](const Result<Ticket>& posted) {
      if (posted.ok()) tickets.push_back(posted.value());
      return posted.status();
    };
    SHVD_TRY(for_each_piece(from, count,
                            [&](Bytes piece) { return add(transport.PostReceive(from, piece)); }));
    SHVD_TRY(for_each_piece(rank, count,
                            [&](Bytes piece) { return add(transport.PostSend(to, piece)); }));
    if (tickets.empty()) continue;
    SHVD_TRY(transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline)
                 .Annotate("gather distance " + std::to_string(distance)));
  }
  return Status();
}

Status AllgatherLinks(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                      Bytes target, Deadline deadline) {
  return (GathersByDoubling(transport.size(), target.size()) ? AllgatherDoubling : AllgatherRing)(
      transport, source, lengths, target, deadline);
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
