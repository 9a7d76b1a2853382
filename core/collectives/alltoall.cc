#include "collectives/alltoall.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/copy.h"
#include "base/wire.h"
#include "collectives/select.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

constexpr size_t kCountBytes = sizeof(int64_t);
// Copying this many bytes twice takes less time than waiting for another message. Measured over TCP
// on one host: 8 KiB gained, 64 KiB lost.
constexpr size_t kMostShortBytes = size_t{16} << 10;
// Limits the memory for short parts of all ranks.
constexpr size_t kMostScratchBytes = size_t{1} << 20;
// Transferring this many bytes takes much longer than their latency.
constexpr size_t kMostInTransit = size_t{256} << 10;

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

// One rank's messages of an alltoall over links. The number of rows of a part travels first, and
// with it the part itself if it is short.
class Messages {
 public:
  Messages(Transport& transport, const RowsToSend& own, size_t short_bytes,
           std::vector<std::byte>& scratch)
      : transport_(transport),
        own_(own),
        parts_(PartsOf(own.splits, own.row_bytes)),
        short_bytes_(short_bytes),
        short_parts_(parts_.size()),
        scratch_(scratch) {}

  // Exchanges the numbers of rows and the short parts with a message to every rank. All of them are
  // in transit at once. Returns the rows by sender.
  Result<std::vector<int64_t>> ExchangeDirectly(Deadline deadline) {
    size_t bytes = parts_.size() * FirstBytes();
    for (const int64_t rows : own_.splits) bytes += FirstBytes(rows);
    Reserve(bytes);
    std::byte* message = scratch_.data() + parts_.size() * FirstBytes();
    std::vector<size_t> lengths(parts_.size());  // of the messages, by sender
    std::vector<Ticket> tickets;
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t to = After(step);
      const size_t from = Before(step);
      const Result<Ticket> receive =
          transport_.PostReceiveUpTo(static_cast<int>(from), First(from), &lengths[from]);
      SHVD_TRY(receive.status());
      const size_t length = WriteFirst(to, message);
      const Result<Ticket> send =
          transport_.PostSend(static_cast<int>(to), ConstBytes(message, length));
      SHVD_TRY(send.status());
      message += length;
      tickets.push_back(receive.value());
      tickets.push_back(send.value());
    }
    SHVD_TRY(Wait(tickets, deadline));
    std::vector<int64_t> rows = own_.splits;  // including the part for itself
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t from = Before(step);
      if (FirstBytes(First(from).Sub(0, lengths[from])) != lengths[from]) {
        return Malformed(from, lengths[from]);
      }
      rows[from] = ReadFirst(from, First(from).data());
    }
    return rows;
  }

  // The same in rounds. What is for the rank s after this one makes the steps whose sum is s: in
  // the round with distance d, everything with the bit d in s moves to the rank d after. It keeps
  // the index s wherever it is, so a rank finds at index s what the rank s before it has sent.
  Result<std::vector<int64_t>> ExchangeInRounds(Deadline deadline) {
    const size_t half = parts_.size() / 2 * FirstBytes();  // no round moves more
    Reserve(parts_.size() * FirstBytes() + 2 * half);
    std::byte* const outgoing = scratch_.data() + parts_.size() * FirstBytes();
    const Bytes incoming(outgoing + half, half);
    const auto size = static_cast<size_t>(transport_.size());
    for (size_t step = 1; step < size; ++step) {
      WriteFirst(After(static_cast<int>(step)), First(step).data());
    }
    for (int distance = 1; distance < transport_.size(); distance *= 2) {
      const auto moves = [&](size_t step) { return (step & static_cast<size_t>(distance)) != 0; };
      size_t length = 0;
      for (size_t step = 1; step < size; ++step) {
        if (!moves(step)) continue;
        const size_t bytes = FirstBytes(First(step));
        CopyBytes(outgoing + length, First(step).data(), bytes);
        length += bytes;
      }
      const size_t from = Before(distance);
      size_t received = 0;
      const Result<Ticket> receive =
          transport_.PostReceiveUpTo(static_cast<int>(from), incoming, &received);
      SHVD_TRY(receive.status());
      const Result<Ticket> send =
          transport_.PostSend(static_cast<int>(After(distance)), ConstBytes(outgoing, length));
      SHVD_TRY(send.status());
      SHVD_TRY(Wait({receive.value(), send.value()}, deadline)
                   .Annotate("alltoall distance " + std::to_string(distance)));
      size_t read = 0;
      for (size_t step = 1; step < size; ++step) {
        if (!moves(step)) continue;
        const Bytes rest = incoming.Sub(read, received - read);
        const size_t bytes = FirstBytes(rest);
        if (bytes > rest.size()) return Malformed(from, received);
        CopyBytes(First(step).data(), rest.data(), bytes);
        read += bytes;
      }
      if (read != received) return Malformed(from, received);
    }
    std::vector<int64_t> rows = own_.splits;  // including the part for itself
    for (size_t step = 1; step < size; ++step) {
      const size_t from = Before(static_cast<int>(step));
      rows[from] = ReadFirst(from, First(step).data());
    }
    return rows;
  }

  // Copies the short parts and sends the others. In step s, every rank sends to the rank s after it
  // and receives from the rank s before it. The steps in transit move a limited number of bytes, so
  // no rank serves many others at once.
  Status Deliver(const std::vector<Slice>& received, Bytes target, Deadline deadline) {
    const size_t me = After(0);
    CopyBytes(target.data() + received[me].begin, own_.data.data() + parts_[me].begin,
              parts_[me].count);
    std::vector<Ticket> tickets;
    size_t in_transit = 0;
    for (int step = 1; step < transport_.size(); ++step) {
      const size_t to = After(step);
      const size_t from = Before(step);
      const Slice& incoming = received[from];
      if (IsShort(incoming)) {
        CopyBytes(target.data() + incoming.begin, short_parts_[from], incoming.count);
      } else {
        const Result<Ticket> receive = transport_.PostReceive(
            static_cast<int>(from), target.Sub(incoming.begin, incoming.count));
        SHVD_TRY(receive.status());
        tickets.push_back(receive.value());
        in_transit += incoming.count;
      }
      if (!IsShort(parts_[to])) {
        const Result<Ticket> send = transport_.PostSend(
            static_cast<int>(to), own_.data.Sub(parts_[to].begin, parts_[to].count));
        SHVD_TRY(send.status());
        tickets.push_back(send.value());
        in_transit += parts_[to].count;
      }
      if (in_transit < kMostInTransit && step + 1 < transport_.size()) continue;
      SHVD_TRY(Wait(tickets, deadline).Annotate("exchange step " + std::to_string(step)));
      tickets.clear();
      in_transit = 0;
    }
    return Status();
  }

 private:
  bool IsShort(const Slice& part) const { return part.count <= short_bytes_; }
  // The most bytes of a number of rows and its short part.
  size_t FirstBytes() const { return kCountBytes + short_bytes_; }
  size_t FirstBytes(int64_t rows) const {
    const auto number = static_cast<uint64_t>(rows);  // from a peer, so of any size
    const bool is_short = own_.row_bytes == 0 || number <= short_bytes_ / own_.row_bytes;
    return kCountBytes + (is_short ? static_cast<size_t>(number) * own_.row_bytes : 0);
  }
  // Returns how many bytes `message` needs, beginning with its number of rows.
  size_t FirstBytes(Bytes message) const {
    if (message.size() < kCountBytes) return kCountBytes;
    return FirstBytes(LoadLittleEndian<int64_t>(message.data()));
  }
  // The memory for a number of rows and a short part: of a sender, or of a number of steps.
  Bytes First(size_t index) const {
    return Bytes(scratch_.data() + index * FirstBytes(), FirstBytes());
  }
  // Writes what is for `receiver`, and returns its length.
  size_t WriteFirst(size_t receiver, std::byte* message) const {
    const size_t length = FirstBytes(own_.splits[receiver]);
    StoreLittleEndian(own_.splits[receiver], message);
    CopyBytes(message + kCountBytes, own_.data.data() + parts_[receiver].begin,
              length - kCountBytes);
    return length;
  }
  // Returns the number of rows of `sender`, and notes where its short part is.
  int64_t ReadFirst(size_t sender, const std::byte* message) {
    short_parts_[sender] = message + kCountBytes;
    return LoadLittleEndian<int64_t>(message);
  }
  void Reserve(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
  }
  size_t After(int step) const {
    return static_cast<size_t>((transport_.rank() + step) % transport_.size());
  }
  size_t Before(int step) const { return After(transport_.size() - step); }

  Status Wait(const std::vector<Ticket>& tickets, Deadline deadline) const {
    if (tickets.empty()) return Status();
    return transport_.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
  }

  static Status Malformed(size_t peer, size_t length) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(peer) + " sent " +
                                             std::to_string(length) +
                                             " bytes, which do not match its number of rows");
  }

  Transport& transport_;
  const RowsToSend& own_;
  const std::vector<Slice> parts_;
  const size_t short_bytes_;
  std::vector<const std::byte*> short_parts_;  // received, by sender
  std::vector<std::byte>& scratch_;
};

// Delivers the parts after the exchange of the `rows`, by sender.
Status Complete(Messages& messages, const Result<std::vector<int64_t>>& rows, size_t row_bytes,
                const RowsTarget& target_of, Deadline deadline) {
  SHVD_TRY(rows.status().Annotate("exchanging the numbers of rows"));
  const Result<Bytes> target = target_of(rows.value());
  SHVD_TRY(target.status());
  return messages.Deliver(PartsOf(rows.value(), row_bytes), target.value(), deadline);
}

}  // namespace

size_t AlltoallShortBytes(int ranks) {
  return std::min(kMostShortBytes, kMostScratchBytes / static_cast<size_t>(ranks));
}

Status AlltoallLinks(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                     std::vector<std::byte>& scratch, Deadline deadline) {
  const auto to_relay = MostBytesToRelay(transport.size(), transport.costs());
  return to_relay ? AlltoallBruck(transport, own, target_of, *to_relay, scratch, deadline)
                  : AlltoallDirect(transport, own, target_of, scratch, deadline);
}

Status AlltoallDirect(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                      std::vector<std::byte>& scratch, Deadline deadline) {
  Messages messages(transport, own, AlltoallShortBytes(transport.size()), scratch);
  const auto rows = messages.ExchangeDirectly(deadline);
  return Complete(messages, rows, own.row_bytes, target_of, deadline);
}

// The algorithm of Bruck, Ho, Kipnis, Upfal and Weathersby ("Efficient algorithms for all-to-all
// communications in multiport message-passing systems", 1997), with parts of different lengths.
Status AlltoallBruck(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                     size_t most_bytes, std::vector<std::byte>& scratch, Deadline deadline) {
  Messages messages(transport, own, most_bytes, scratch);
  const auto rows = messages.ExchangeInRounds(deadline);
  return Complete(messages, rows, own.row_bytes, target_of, deadline);
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
