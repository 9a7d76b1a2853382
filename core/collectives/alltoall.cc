#include "collectives/alltoall.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/copy.h"
#include "base/wire.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

constexpr size_t kCountBytes = sizeof(int64_t);
// Copying this many bytes twice takes less time than waiting for another message. Measured over TCP
// on one host: 8 KiB gained, 64 KiB lost.
constexpr size_t kMostShortBytes = size_t{16} << 10;
// Limits the memory for short parts of all ranks.
constexpr size_t kMostScratchBytes = size_t{1} << 20;

// The parts of consecutive rows, in bytes.
std::vector<Slice> PartsOf(const std::vector<int64_t>& rows, size_t row_bytes) {
  std::vector<Slice> parts;
  parts.reserve(rows.size());
  size_t begin = 0;
  for (const int64_t number : rows) {
    parts.push_back(Slice{begin, static_cast<size_t>(number) * row_bytes});
    begin += parts.back().count;
  }
  return parts;
}

// The part of a sender's rows for one receiver: `count` of its `total` rows, from `begin` on.
struct Section {
  size_t begin = 0;
  size_t count = 0;
  size_t total = 0;
};

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

// One rank's messages of an alltoall over links. The first message to a peer is the number of rows,
// and the part itself if it is short. All of them are in transit at once.
class Messages {
 public:
  Messages(Transport& transport, const RowsToSend& own, std::vector<std::byte>& scratch)
      : transport_(transport),
        own_(own),
        parts_(PartsOf(own.splits, own.row_bytes)),
        short_bytes_(AlltoallShortBytes(transport.size())),
        lengths_(parts_.size()),
        scratch_(scratch) {
    size_t bytes = parts_.size() * FirstBytes();
    for (const Slice& part : parts_) bytes += FirstBytes(part);
    if (scratch_.size() < bytes) scratch_.resize(bytes);
  }

  Result<std::vector<int64_t>> ExchangeFirst(Deadline deadline) {
    std::byte* message = scratch_.data() + parts_.size() * FirstBytes();
    std::vector<Ticket> tickets;
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t to = After(step);
      const size_t from = Before(step);
      const Result<Ticket> receive =
          transport_.PostReceiveUpTo(static_cast<int>(from), First(from), &lengths_[from]);
      SHVD_TRY(receive.status());
      StoreLittleEndian(own_.splits[to], message);
      const size_t bytes = FirstBytes(parts_[to]);
      CopyBytes(message + kCountBytes, own_.data.data() + parts_[to].begin, bytes - kCountBytes);
      const Result<Ticket> send =
          transport_.PostSend(static_cast<int>(to), ConstBytes(message, bytes));
      SHVD_TRY(send.status());
      message += bytes;
      tickets.push_back(receive.value());
      tickets.push_back(send.value());
    }
    SHVD_TRY(Wait(tickets, deadline));
    std::vector<int64_t> rows = own_.splits;  // including the part for itself
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t from = Before(step);
      if (lengths_[from] < kCountBytes) return Malformed(from);
      rows[from] = LoadLittleEndian<int64_t>(First(from).data());
    }
    return rows;
  }

  // In step s, every rank sends to the rank s after it and receives from the rank s before it, so
  // no rank serves two others at once.
  Status Deliver(const std::vector<Slice>& received, Bytes target, Deadline deadline) {
    const size_t me = After(0);
    CopyBytes(target.data() + received[me].begin, own_.data.data() + parts_[me].begin,
              parts_[me].count);
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t to = After(step);
      const size_t from = Before(step);
      const Slice& incoming = received[from];
      if (lengths_[from] != FirstBytes(incoming)) return Malformed(from);
      std::vector<Ticket> tickets;
      if (IsShort(incoming)) {
        CopyBytes(target.data() + incoming.begin, First(from).data() + kCountBytes, incoming.count);
      } else {
        const Result<Ticket> receive = transport_.PostReceive(
            static_cast<int>(from), target.Sub(incoming.begin, incoming.count));
        SHVD_TRY(receive.status());
        tickets.push_back(receive.value());
      }
      if (!IsShort(parts_[to])) {
        const Result<Ticket> send = transport_.PostSend(
            static_cast<int>(to), own_.data.Sub(parts_[to].begin, parts_[to].count));
        SHVD_TRY(send.status());
        tickets.push_back(send.value());
      }
      SHVD_TRY(Wait(tickets, deadline).Annotate("exchange step " + std::to_string(step)));
    }
    return Status();
  }

 private:
  bool IsShort(const Slice& part) const { return part.count <= short_bytes_; }
  size_t FirstBytes() const { return kCountBytes + short_bytes_; }
  size_t FirstBytes(const Slice& part) const {
    return kCountBytes + (IsShort(part) ? part.count : 0);
  }
  // The memory for the first message of a peer.
  Bytes First(size_t peer) const {
    return Bytes(scratch_.data() + peer * FirstBytes(), FirstBytes());
  }
  size_t After(int step) const {
    return static_cast<size_t>((transport_.rank() + step) % transport_.size());
  }
  size_t Before(int step) const { return After(transport_.size() - step); }

  Status Wait(const std::vector<Ticket>& tickets, Deadline deadline) const {
    if (tickets.empty()) return Status();
    return transport_.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
  }

  Status Malformed(size_t peer) const {
    return Status(StatusCode::kInternal, "rank " + std::to_string(peer) + " sent " +
                                             std::to_string(lengths_[peer]) +
                                             " bytes, which do not match its number of rows");
  }

  Transport& transport_;
  const RowsToSend& own_;
  const std::vector<Slice> parts_;
  const size_t short_bytes_;
  std::vector<size_t> lengths_;  // of the first messages, by sender
  std::vector<std::byte>& scratch_;
};

}  // namespace

size_t AlltoallShortBytes(int ranks) {
  return std::min(kMostShortBytes, kMostScratchBytes / static_cast<size_t>(ranks));
}

Status AlltoallLinks(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                     std::vector<std::byte>& scratch, Deadline deadline) {
  Messages messages(transport, own, scratch);
  const Result<std::vector<int64_t>> rows = messages.ExchangeFirst(deadline);
  SHVD_TRY(rows.status().Annotate("exchanging the numbers of rows"));
  const Result<Bytes> target = target_of(rows.value());
  SHVD_TRY(target.status());
  return messages.Deliver(PartsOf(rows.value(), own.row_bytes), target.value(), deadline);
}

// Every member publishes its sections, by receiver, and then its rows, in as many rounds as that
// takes. The others copy the sections and the rows that are for them.
Status AlltoallShm(ArenaSteps& steps, const RowsToSend& own, const RowsTarget& target_of,
                   Deadline deadline) {
  const std::vector<Section> outgoing = SectionsOf(own.splits);
  const auto* header = reinterpret_cast<const std::byte*>(outgoing.data());
  const size_t header_bytes = outgoing.size() * sizeof(Section);
  std::vector<Section> incoming(outgoing.size());
  Bytes target;
  const size_t stretch = steps.SlotBytes();
  size_t longest = header_bytes;  // the most bytes of any member, as far as known
  for (size_t done = 0; done < longest; done += stretch) {
    // Returns the part of the `count` bytes from `begin` that is published in this round.
    const auto in_round = [&](size_t begin, size_t count) {
      const size_t first = std::max(begin, done);
      const size_t last = std::min(begin + count, done + stretch);
      return Slice{first, first < last ? last - first : 0};
    };
    const ArenaSteps::Round round = steps.StartRound();
    std::byte* slot = round.Slot(steps.member());
    const auto publish = [&](const std::byte* source, size_t begin, size_t count) {
      const Slice part = in_round(begin, count);
      if (part.count == 0) return;
      CopyBytes(slot + (part.begin - done), source + (part.begin - begin), part.count);
    };
    publish(header, 0, header_bytes);
    publish(own.data.data(), header_bytes, own.data.size());
    SHVD_TRY(steps.ArriveAndAwaitAll(deadline));
    const auto copy = [&](size_t sender, size_t begin, size_t count, std::byte* part_target) {
      const Slice part = in_round(begin, count);
      if (part.count == 0) return;
      CopyBytes(part_target + (part.begin - begin),
                round.Slot(static_cast<int>(sender)) + (part.begin - done), part.count);
    };
    const size_t own_section = static_cast<size_t>(steps.member()) * sizeof(Section);
    if (done < header_bytes) {
      for (size_t sender = 0; sender < incoming.size(); ++sender) {
        copy(sender, own_section, sizeof(Section), reinterpret_cast<std::byte*>(&incoming[sender]));
      }
      if (done + stretch < header_bytes) continue;
      std::vector<int64_t> rows;
      rows.reserve(incoming.size());
      for (const Section& section : incoming) {
        rows.push_back(static_cast<int64_t>(section.count));
        longest = std::max(longest, header_bytes + section.total * own.row_bytes);
      }
      const Result<Bytes> made = target_of(rows);
      SHVD_TRY(made.status());
      target = made.value();
    }
    size_t offset = 0;  // of the sender's part in the target
    for (size_t sender = 0; sender < incoming.size(); ++sender) {
      const Section& section = incoming[sender];
      const size_t bytes = section.count * own.row_bytes;
      copy(sender, header_bytes + section.begin * own.row_bytes, bytes, target.data() + offset);
      offset += bytes;
    }
  }
  return Status();
}

}  // namespace sparkhvd
