// A message goes through the ring of its sender and receiver: the header of message_header.h, then
// the payload, as much at a time as there is space. The bytes of all messages form one stream, as
// in a socket. A rank sleeps on its own bell, which its peers ring when they have moved data, or
// have left.
#include "transport/memory_links.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/copy.h"
#include "base/futex.h"
#include "base/spin.h"
#include "base/wait.h"
#include "transport/failures.h"
#include "transport/message_header.h"
#include "transport/transfer.h"

namespace sparkhvd {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint64_t kLinksMagic = 0x31306b6e696c6873;  // "shlink01"

// The memory of the rings in which one rank sends. With larger rings, ranks would wake each other
// less often during a large message, but every process set takes this memory.
constexpr size_t kRingBytesPerRank = size_t{256} << 10;
constexpr size_t kLargestRing = size_t{64} << 10;
constexpr size_t kSmallestRing = size_t{4} << 10;

enum RankState : uint32_t { kTakesPart = 0, kHasClosed = 1, kHasAborted = 2 };

struct LinksHeader {
  uint64_t magic;
  uint64_t count;
};

struct RankSlot {
  alignas(64) std::atomic<uint32_t> bell;  // the futex word on which this rank sleeps
  std::atomic<uint32_t> waiters;
  // Written once, after the last data of this rank.
  alignas(64) std::atomic<uint32_t> state;
  uint32_t code;
  uint32_t length;
  std::array<char, kMaxFarewellBytes> text;  // why it aborted
};

// The numbers of bytes that have been written and read so far, each changed by one side only.
struct RingCursors {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> full;  // whether the writer waits for space
};

// Returns the bytes of one ring, a power of two.
size_t RingBytes(size_t count) {
  size_t bytes = kLargestRing;
  while (bytes > kSmallestRing && bytes * (count - 1) > kRingBytesPerRank) bytes /= 2;
  return bytes;
}

// Where the parts are in the memory.
struct Layout {
  explicit Layout(size_t ranks)
      : count(ranks),
        ring_bytes(RingBytes(ranks)),
        slots(AlignUp(sizeof(LinksHeader), alignof(RankSlot))),
        cursors(slots + count * sizeof(RankSlot)),
        data(AlignUp(cursors + count * count * sizeof(RingCursors), kPageBytes)),
        total(data + count * (count - 1) * ring_bytes) {}

  static size_t AlignUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

  size_t count;
  size_t ring_bytes;
  size_t slots;
  size_t cursors;
  size_t data;
  size_t total;
};

void RingBell(RankSlot& slot) {
  // As in an arena: the bell changes before this checks for waiters, and a waiter registers before
  // it sleeps on the old value, so no wake-up is lost.
  slot.bell.fetch_add(1);
  if (slot.waiters.load() != 0) FutexWakeAll(slot.bell);
}

// The stream of bytes from one rank to another.
class Ring {
 public:
  Ring(RingCursors* cursors, std::byte* data, size_t capacity)
      : cursors_(cursors), data_(data), capacity_(capacity) {}

  // Copies as many bytes as there is space for. Returns their number.
  size_t Write(ConstBytes source) {
    const uint64_t written = cursors_->written.load(std::memory_order_relaxed);
    size_t space = capacity_ - (written - cursors_->read.load(std::memory_order_acquire));
    if (space < source.size()) {
      // The reader checks the mark after it has made space, and this checks the space after it has
      // set the mark. One of the two sees the other.
      cursors_->full.store(1);
      space = capacity_ - (written - cursors_->read.load());
    }
    const size_t count = std::min(space, source.size());
    if (count == 0) return 0;
    const size_t begin = written & (capacity_ - 1);
    const size_t first = std::min(count, capacity_ - begin);
    CopyBytes(data_ + begin, source.data(), first);
    CopyBytes(data_, source.data() + first, count - first);
    cursors_->written.store(written + count, std::memory_order_release);
    return count;
  }

  size_t Read(Bytes target) {
    const uint64_t read = cursors_->read.load(std::memory_order_relaxed);
    const uint64_t filled = cursors_->written.load(std::memory_order_acquire) - read;
    const size_t count = std::min<size_t>(filled, target.size());
    if (count == 0) return 0;
    const size_t begin = read & (capacity_ - 1);
    const size_t first = std::min(count, capacity_ - begin);
    CopyBytes(target.data(), data_ + begin, first);
    CopyBytes(target.data() + first, data_, count - first);
    cursors_->read.store(read + count);
    return count;
  }

  // Returns whether the writer has to be woken, because it waited for space.
  bool TakeFull() { return cursors_->full.load() != 0 && cursors_->full.exchange(0) != 0; }

 private:
  RingCursors* cursors_;
  std::byte* data_;
  size_t capacity_;
};

// Returns the rest of the header, or of the data.
Bytes Rest(Transfer& transfer) {
  if (transfer.done < kMessageHeaderBytes) {
    return {transfer.header.data() + transfer.done, kMessageHeaderBytes - transfer.done};
  }
  return {transfer.data + transfer.payload_done(), transfer.total() - transfer.done};
}

class RingLink {
 public:
  RingLink(int peer, RankSlot& slot, Ring outgoing, Ring incoming)
      : peer_(peer), slot_(slot), outgoing_(outgoing), incoming_(incoming) {}

  int peer() const { return peer_; }
  bool pending() const { return !transfers_.empty(); }
  TransferQueues& transfers() { return transfers_; }
  const TransferQueues& transfers() const { return transfers_; }
  const Status& failure() const { return failure_; }

  // Moves all bytes that the rings accept and offer now. Removes completed tickets from `open`.
  // Returns true if any bytes moved.
  bool Advance(std::unordered_set<Ticket>& open) {
    if (!failure_.ok() || !pending()) return false;
    // Read first: everything that the peer wrote before it left then counts.
    const uint32_t state = slot_.state.load(std::memory_order_acquire);
    const bool sent = state == kTakesPart && AdvanceSends(open);
    const bool received = AdvanceReceives(open);
    if (sent || (received && incoming_.TakeFull())) RingBell(slot_);
    if (failure_.ok() && pending() && state != kTakesPart) failure_ = Departure(state);
    return sent || received;
  }

  // Called if the peer's process has ended, perhaps after it has left.
  void EndWithProcess(std::unordered_set<Ticket>& open) {
    static_cast<void>(Advance(open));
    if (failure_.ok() && pending()) {
      failure_ = PeerLost(peer_, "its process has ended").Annotate(Front());
    }
  }

  void WakePeer() { RingBell(slot_); }

 private:
  bool AdvanceSends(std::unordered_set<Ticket>& open) {
    bool moved = false;
    while (!transfers_.sends.empty()) {
      Transfer& transfer = transfers_.sends.front();
      while (transfer.done < transfer.total()) {
        const size_t count = outgoing_.Write(Rest(transfer));
        if (count == 0) return moved;
        transfer.done += count;
        moved = true;
      }
      open.erase(transfer.ticket);
      transfers_.sends.pop_front();
    }
    return moved;
  }

  bool AdvanceReceives(std::unordered_set<Ticket>& open) {
    bool moved = false;
    while (!transfers_.receives.empty()) {
      Transfer& transfer = transfers_.receives.front();
      while (transfer.done < transfer.total()) {
        const size_t count = incoming_.Read(Rest(transfer));
        if (count == 0) return moved;
        const bool in_header = transfer.done < kMessageHeaderBytes;
        transfer.done += count;
        moved = true;
        if (in_header && transfer.done == kMessageHeaderBytes && !CheckHeader(transfer)) {
          return moved;
        }
      }
      open.erase(transfer.ticket);
      transfers_.receives.pop_front();
    }
    return moved;
  }

  bool CheckHeader(Transfer& transfer) {
    const auto header =
        DecodeMessageHeader(ConstBytes(transfer.header.data(), transfer.header.size()));
    if (!header.ok()) {
      failure_ = header.status().Annotate(Front());
    } else if (Status wrong = transfer.SetLength(header.value().length, peer_); !wrong.ok()) {
      failure_ = std::move(wrong);
    }
    return failure_.ok();
  }

  // Returns why the peer's end makes the next transfer fail.
  Status Departure(uint32_t state) const {
    if (state != kHasAborted) return PeerLost(peer_, kClosedLinks).Annotate(Front());
    const size_t length = std::min<size_t>(slot_.length, slot_.text.size());
    const Status why(static_cast<StatusCode>(slot_.code), std::string(slot_.text.data(), length));
    return PeerAborted(peer_, why).Annotate(Front());
  }

  // Returns the name of the failing transfer.
  std::string Front() const {
    return TransferName(transfers_.receives.empty() ? Direction::kSend : Direction::kReceive,
                        peer_);
  }

  int peer_;
  RankSlot& slot_;  // the peer's
  Ring outgoing_;
  Ring incoming_;
  TransferQueues transfers_;
  Status failure_;
};

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(std::shared_ptr<SharedMapping> mapping, int rank, int size,
                  std::shared_ptr<const MemberWatches> watches, const LinkCosts& costs)
      : mapping_(std::move(mapping)),
        layout_(static_cast<size_t>(size)),
        rank_(rank),
        size_(size),
        watches_(std::move(watches)),
        costs_(costs),
        spins_(static_cast<unsigned>(size) <= std::thread::hardware_concurrency()),
        own_(Slot(rank)) {
    links_.reserve(layout_.count - 1);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      links_.emplace_back(peer, Slot(peer), RingFrom(rank, peer), RingFrom(peer, rank));
    }
  }

  ~MemoryTransport() override { Leave(kHasClosed, Status()); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  LinkCosts costs() const override { return costs_; }

  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    return Post(Direction::kSend, peer, const_cast<std::byte*>(data.data()), data.size());
  }

  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return Post(Direction::kReceive, peer, data.data(), data.size());
  }

  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return Post(Direction::kReceive, peer, data.data(), data.size(), length);
  }

  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (aborts_waiting_.load() != 0) AwaitNotification(aborted_, lock);
      if (broken_) return *broken_;
      const uint32_t bell = own_.bell.load();
      const bool moved = AdvanceLinks();
      if (Status failure = FirstFailure(); !failure.ok()) return Break(failure);
      const Ticket* open = FirstOpen(tickets, open_);
      if (open == nullptr) return Status();
      if (deadline.Expired()) return Break(LateTicket(links_, *open));
      if (!moved && !(spins_ && Spin(bell))) Sleep(lock, bell, deadline);
    }
  }

  void Abort(const Status& why) override {
    aborts_waiting_.fetch_add(1);
    RingBell(own_);
    const std::lock_guard<std::mutex> lock(mutex_);
    aborts_waiting_.fetch_sub(1);
    if (!broken_) {
      (void)Break(why.ok() ? Status(StatusCode::kAborted, "aborted without a reason") : why);
    }
    aborted_.notify_all();
  }

 private:
  RankSlot& Slot(int rank) const {
    return reinterpret_cast<RankSlot*>(mapping_->data() + layout_.slots)[rank];
  }

  Ring RingFrom(int sender, int receiver) const {
    const auto from = static_cast<size_t>(sender);
    const auto to = static_cast<size_t>(receiver);
    auto* cursors = reinterpret_cast<RingCursors*>(mapping_->data() + layout_.cursors);
    const size_t index = from * (layout_.count - 1) + (to < from ? to : to - 1);
    return Ring(cursors + from * layout_.count + to,
                mapping_->data() + layout_.data + index * layout_.ring_bytes, layout_.ring_bytes);
  }

  RingLink& LinkTo(int peer) { return links_[static_cast<size_t>(peer < rank_ ? peer : peer - 1)]; }

  Result<Ticket> Post(Direction direction, int peer, std::byte* data, size_t size,
                      size_t* length = nullptr) {
    SHVD_TRY(CheckPeer(peer, rank_, size_));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return *broken_;
    Transfer transfer{++last_ticket_, data, size, length, {}};
    const bool sending = direction == Direction::kSend;
    if (sending) transfer.header = EncodeMessageHeader({false, size, StatusCode::kAborted});
    open_.insert(transfer.ticket);
    RingLink& link = LinkTo(peer);
    link.transfers().Post(direction, transfer);
    // Sends small messages before the wait. Wait reports any failure of this.
    if (sending) link.Advance(open_);
    return transfer.ticket;
  }

  bool AdvanceLinks() {
    bool moved = false;
    for (RingLink& link : links_) moved = link.Advance(open_) || moved;
    return moved;
  }

  Status FirstFailure() const {
    for (const RingLink& link : links_) SHVD_TRY(link.failure());
    return Status();
  }

  // Returns whether the bell changes within a moment.
  bool Spin(uint32_t bell) const {
    const Deadline end = Deadline::After(SpinsLong::Time());
    do {
      for (int i = 0; i < 16; ++i) Pause();
      if (own_.bell.load(std::memory_order_relaxed) != bell) return true;
    } while (!end.Expired());
    return false;
  }

  // Sleeps without the mutex until the bell has changed from `bell`, or the deadline. Then looks
  // for peers that have ended without notice.
  void Sleep(std::unique_lock<std::mutex>& lock, uint32_t bell, Deadline deadline) {
    const auto time = std::min<std::chrono::nanoseconds>(deadline.Remaining(), kWatchInterval);
    lock.unlock();
    own_.waiters.fetch_add(1);
    FutexWait(own_.bell, bell, time);
    own_.waiters.fetch_sub(1);
    lock.lock();
    if (broken_ || !watches_ || own_.bell.load() != bell) return;
    for (RingLink& link : links_) {
      if (link.pending() && watches_->Ended(link.peer())) link.EndWithProcess(open_);
    }
  }

  Status Break(const Status& why) {
    broken_ = why;
    Leave(kHasAborted, why);
    for (RingLink& link : links_) link.transfers().Clear();
    open_.clear();
    return why;
  }

  // Tells the peers that this rank takes no part any more.
  void Leave(RankState state, const Status& why) {
    if (own_.state.load(std::memory_order_relaxed) != kTakesPart) return;
    const size_t length = std::min(why.message().size(), own_.text.size());
    std::memcpy(own_.text.data(), why.message().data(), length);
    own_.code = static_cast<uint32_t>(why.code());
    own_.length = static_cast<uint32_t>(length);
    own_.state.store(state, std::memory_order_release);
    for (RingLink& link : links_) link.WakePeer();
  }

  const std::shared_ptr<SharedMapping> mapping_;
  const Layout layout_;
  const int rank_;
  const int size_;
  const std::shared_ptr<const MemberWatches> watches_;
  const LinkCosts costs_;
  const bool spins_;
  RankSlot& own_;
  std::atomic<int> aborts_waiting_{0};  // a mutex is not fair: Wait lets these threads lock it
  std::condition_variable aborted_;
  std::mutex mutex_;             // guards all fields below; released while sleeping
  std::vector<RingLink> links_;  // to all other ranks, ascending
  std::unordered_set<Ticket> open_;
  Ticket last_ticket_ = 0;
  std::optional<Status> broken_;
};

}  // namespace

size_t MemoryLinksBytes(size_t count) { return Layout(count).total; }

void FormatMemoryLinks(SharedMapping& mapping, size_t count) {
  const Layout layout(count);
  auto* slots = reinterpret_cast<RankSlot*>(mapping.data() + layout.slots);
  for (size_t i = 0; i < count; ++i) new (slots + i) RankSlot{};
  auto* cursors = reinterpret_cast<RingCursors*>(mapping.data() + layout.cursors);
  for (size_t i = 0; i < count * count; ++i) new (cursors + i) RingCursors{};
  new (mapping.data()) LinksHeader{kLinksMagic, count};
}

Status CheckMemoryLinks(const SharedMapping& mapping, size_t count) {
  const auto& header = *reinterpret_cast<const LinksHeader*>(mapping.data());
  if (mapping.size() == MemoryLinksBytes(count) && header.magic == kLinksMagic &&
      header.count == count) {
    return Status();
  }
  return Status(StatusCode::kInternal,
                "the shared memory does not hold the links of " + std::to_string(count) + " ranks");
}

std::unique_ptr<Transport> MakeMemoryTransport(std::shared_ptr<SharedMapping> mapping, int rank,
                                               int size,
                                               std::shared_ptr<const MemberWatches> watches,
                                               const LinkCosts& costs) {
  return std::make_unique<MemoryTransport>(std::move(mapping), rank, size, std::move(watches),
                                           costs);
}

}  // namespace sparkhvd
