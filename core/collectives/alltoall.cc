#include "collectives/alltoall.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/copy.h"
#include "collectives/exchange.h"

namespace sparkhvd {
namespace {

std::vector<size_t> OffsetsOf(const std::vector<size_t>& lengths) {
  std::vector<size_t> offsets(lengths.size());
  std::exclusive_scan(lengths.begin(), lengths.end(), offsets.begin(), size_t{0});
  return offsets;
}

}  // namespace

std::vector<Section> SectionsOf(const std::vector<int64_t>& splits) {
  std::vector<Section> sections;
  sections.reserve(splits.size());
  size_t total = 0;
  for (const int64_t rows : splits) {
    sections.push_back({total, static_cast<size_t>(rows), 0});
    total += sections.back().count;
  }
  for (Section& section : sections) section.total = total;
  return sections;
}

std::vector<int64_t> RowsOf(const std::vector<Section>& sections) {
  std::vector<int64_t> rows;
  rows.reserve(sections.size());
  for (const Section& section : sections) rows.push_back(static_cast<int64_t>(section.count));
  return rows;
}

// The messages are short, so all of them are in transit at once.
Result<std::vector<Section>> ExchangeSections(Transport& transport,
                                              const std::vector<Section>& sections,
                                              Deadline deadline) {
  std::vector<Section> received = sections;  // including the part for itself
  std::vector<Ticket> tickets;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    const auto index = static_cast<size_t>(peer);
    const Result<Ticket> receive = transport.PostReceive(
        peer, Bytes(reinterpret_cast<std::byte*>(&received[index]), sizeof(Section)));
    SHVD_TRY(receive.status());
    const Result<Ticket> send = transport.PostSend(
        peer, ConstBytes(reinterpret_cast<const std::byte*>(&sections[index]), sizeof(Section)));
    SHVD_TRY(send.status());
    tickets.push_back(receive.value());
    tickets.push_back(send.value());
  }
  if (tickets.empty()) return received;
  SHVD_TRY(transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline)
               .Annotate("exchanging the numbers of rows"));
  return received;
}

Result<std::vector<Section>> ExchangeSections(ArenaSteps& steps,
                                              const std::vector<Section>& sections,
                                              Deadline deadline) {
  const auto me = static_cast<size_t>(steps.member());
  const size_t all = sections.size() * sizeof(Section);
  const std::vector<Section> columns(sections.size(), {me * sizeof(Section), sizeof(Section), all});
  std::vector<Section> received(sections.size());
  SHVD_TRY(AlltoallShm(steps, ConstBytes(reinterpret_cast<const std::byte*>(sections.data()), all),
                       Bytes(reinterpret_cast<std::byte*>(received.data()), all), columns, deadline)
               .Annotate("exchanging the numbers of rows"));
  return received;
}

// In step s, every rank sends to the rank s after it and receives from the rank s before it, so no
// rank serves two others at once.
Status AlltoallPairwise(Transport& transport, ConstBytes source, const std::vector<size_t>& sent,
                        Bytes target, const std::vector<size_t>& received, Deadline deadline) {
  const int size = transport.size();
  const int rank = transport.rank();
  const std::vector<size_t> source_offsets = OffsetsOf(sent);
  const std::vector<size_t> target_offsets = OffsetsOf(received);
  const auto outgoing = [&](int peer) {
    const auto index = static_cast<size_t>(peer);
    return source.Sub(source_offsets[index], sent[index]);
  };
  const auto incoming = [&](int peer) {
    const auto index = static_cast<size_t>(peer);
    return target.Sub(target_offsets[index], received[index]);
  };
  CopyBytes(incoming(rank).data(), outgoing(rank).data(), outgoing(rank).size());
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    const int from = (rank + size - step) % size;
    SHVD_TRY(Exchange(transport, to, outgoing(to), from, incoming(from), deadline)
                 .Annotate("exchange step " + std::to_string(step)));
  }
  return Status();
}

// Every round publishes the next section of every member's source. Each member copies its own part
// of it.
Status AlltoallShm(ArenaSteps& steps, ConstBytes source, Bytes target,
                   const std::vector<Section>& received, Deadline deadline) {
  size_t longest = 0;
  for (const Section& section : received) longest = std::max(longest, section.total);
  const size_t stretch = steps.SlotBytes();
  for (size_t done = 0; done < longest; done += stretch) {
    const ArenaSteps::Round round = steps.StartRound();
    const size_t own = source.size() > done ? std::min(stretch, source.size() - done) : 0;
    CopyBytes(round.Slot(steps.member()), source.data() + done, own);
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    size_t target_offset = 0;  // offset of the sender's part in the target
    for (size_t sender = 0; sender < received.size(); ++sender) {
      const Section& section = received[sender];
      const size_t first = std::max(section.begin, done);
      const size_t last = std::min(section.begin + section.count, done + stretch);
      if (first < last) {
        CopyBytes(target.data() + target_offset + (first - section.begin),
                  round.Slot(static_cast<int>(sender)) + (first - done), last - first);
      }
      target_offset += section.count;
    }
  }
  return Status();
}

}  // namespace sparkhvd
