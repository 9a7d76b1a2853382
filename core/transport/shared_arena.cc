#include "transport/shared_arena.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>

#include "base/futex.h"
#include "base/io_status.h"
#include "base/spin.h"
#include "transport/failures.h"

namespace sparkhvd {
namespace {

constexpr size_t kPage = 4096;
// Holds four slots for a chunk of an allreduce.
constexpr size_t kDirectRegionBytes = size_t{1} << 20;

constexpr uint64_t kArenaMagic = 0x3130616e65726173;  // "sarena01"

enum AbortState : uint32_t { kRunning = 0, kWritingReason = 1, kAborted = 2 };

struct ArenaHeader {
  uint64_t magic;
  uint64_t count;
  uint64_t region_bytes;
  // Rarely written but read by every wait, so it has a cache line without counters.
  alignas(64) std::atomic<uint32_t> abort_state;
  uint32_t abort_code;
  int32_t abort_rank;
  uint32_t abort_length;
  std::array<char, 1024> abort_text;
};

// The published state of one member. Other members poll the first cache line. Waiters write the
// second.
struct MemberSlot {
  alignas(64) std::atomic<uint64_t> counter;
  std::atomic<uint32_t> bell;  // the futex word: every Arrive, Abort and departure changes it
  alignas(64) std::atomic<uint32_t> waiters;
  std::atomic<uint32_t> departed;
};

size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Returns the offset of the first region. All regions begin in the middle of a page. Large tensors
// begin near the start of one, and copies between addresses that are close within their pages are
// slow: processors compare only the lower 12 bits to find loads that depend on earlier stores.
size_t RegionsOffset(size_t count) {
  return WholePages(sizeof(ArenaHeader) + count * sizeof(MemberSlot)) + kPage / 2;
}

class SharedArena final : public Arena {
 public:
  SharedArena(std::shared_ptr<SharedMapping> mapping, int member, std::vector<int> ranks,
              size_t region_bytes, std::shared_ptr<const MemberWatches> watches)
      : mapping_(std::move(mapping)),
        member_(member),
        ranks_(std::move(ranks)),
        region_bytes_(WholePages(region_bytes)),
        watches_(std::move(watches)),
        spins_(ranks_.size() <= std::thread::hardware_concurrency()) {}

  ~SharedArena() override {
    Slot(member_).departed.store(1, std::memory_order_release);
    Ring(Slot(member_));
  }

  int member() const override { return member_; }
  int count() const override { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const override { return ranks_; }

  Bytes Region(int member) const override {
    const size_t offset =
        RegionsOffset(ranks_.size()) + static_cast<size_t>(member) * region_bytes_;
    return Bytes(mapping_->data() + offset, region_bytes_);
  }

  uint64_t Arrive() override {
    MemberSlot& slot = Slot(member_);
    const uint64_t value = slot.counter.load(std::memory_order_relaxed) + 1;
    slot.counter.store(value, std::memory_order_release);
    Ring(slot);
    return value;
  }

  Status AwaitAll(uint64_t step, Deadline deadline) override {
    return AwaitRange(0, count(), step, deadline);
  }

  Status Await(int member, uint64_t step, Deadline deadline) override {
    if (member < 0 || member >= count()) {
      return Status(StatusCode::kInvalidArgument, "the arena has members 0 to " +
                                                      std::to_string(count() - 1) + ", not " +
                                                      std::to_string(member));
    }
    return AwaitRange(member, member + 1, step, deadline);
  }

  void Abort(const Status& why) override {
    ArenaHeader& header = Header();
    uint32_t expected = kRunning;
    if (header.abort_state.compare_exchange_strong(expected, kWritingReason)) {
      const size_t length = std::min(why.message().size(), header.abort_text.size());
      std::memcpy(header.abort_text.data(), why.message().data(), length);
      header.abort_code = static_cast<uint32_t>(why.ok() ? StatusCode::kAborted : why.code());
      header.abort_rank = ranks_[static_cast<size_t>(member_)];
      header.abort_length = static_cast<uint32_t>(length);
      header.abort_state.store(kAborted, std::memory_order_release);
    }
    for (int m = 0; m < count(); ++m) Ring(Slot(m));
  }

 private:
  ArenaHeader& Header() const { return *reinterpret_cast<ArenaHeader*>(mapping_->data()); }

  MemberSlot& Slot(int member) const {
    auto* slots = reinterpret_cast<MemberSlot*>(mapping_->data() + sizeof(ArenaHeader));
    return slots[member];
  }

  // The bell changes before this checks for waiters, and a waiter registers before it sleeps on the
  // old value of the bell. One of the two sees the other, so no wake-up is lost.
  static void Ring(MemberSlot& slot) {
    slot.bell.fetch_add(1);
    if (slot.waiters.load() != 0) FutexWakeAll(slot.bell);
  }

  bool Reached(int member, uint64_t step) const {
    return Slot(member).counter.load(std::memory_order_acquire) >= step;
  }

  bool Aborted() const { return Header().abort_state.load(std::memory_order_acquire) == kAborted; }

  Status AbortReason() const {
    const ArenaHeader& header = Header();
    const size_t length = std::min<size_t>(header.abort_length, header.abort_text.size());
    const Status why(static_cast<StatusCode>(header.abort_code),
                     std::string(header.abort_text.data(), length));
    const bool ours = header.abort_rank == ranks_[static_cast<size_t>(member_)];
    return ours ? why : PeerAborted(header.abort_rank, why);
  }

  Status AwaitRange(int first, int last, uint64_t step, Deadline deadline) {
    int member = first;
    const auto advance = [&] {
      while (member < last && Reached(member, step)) ++member;
      return member == last;
    };
    if (advance() || (spins_ && Spin(advance, deadline))) return Status();
    while (!advance()) {
      MemberSlot& slot = Slot(member);
      const uint32_t bell = slot.bell.load();
      if (Reached(member, step)) continue;
      // An abort after a step that all members have reached must not undo the step for slow
      // members.
      if (Aborted()) return advance() ? Status() : AbortReason();
      SHVD_TRY(FindDeparted(member, last, step));
      const auto left = deadline.Remaining();
      if (left.count() == 0) return Late(member, last, step);
      slot.waiters.fetch_add(1);
      FutexWait(slot.bell, bell, std::min<std::chrono::nanoseconds>(left, kWatchInterval));
      slot.waiters.fetch_sub(1);
      if (slot.bell.load() == bell) SHVD_TRY(FindDead(member, last, step));
    }
    return Status();
  }

  template <typename Condition>
  bool Spin(const Condition& condition, Deadline deadline) const {
    const auto end = std::min(Deadline::Clock::now() + SpinsLong::Time(), deadline.at());
    do {
      for (int i = 0; i < 16; ++i) Pause();
      if (condition()) return true;
    } while (!Aborted() && Deadline::Clock::now() < end);
    return false;
  }

  // A member that left after reaching the step is not missing, so its counter is read again once
  // its end has been noticed.
  Status FindDeparted(int first, int last, uint64_t step) const {
    for (int m = first; m < last; ++m) {
      if (Slot(m).departed.load(std::memory_order_acquire) != 0 && !Reached(m, step)) {
        return PeerLost(ranks_[static_cast<size_t>(m)], "it left the job");
      }
    }
    return Status();
  }

  Status FindDead(int first, int last, uint64_t step) const {
    if (!watches_) return Status();
    for (int m = first; m < last; ++m) {
      if (m == member_ || Reached(m, step)) continue;
      if (!watches_->Ended(m)) continue;
      // A member that leaves first sets its mark and then closes its sockets, so this is no crash.
      SHVD_TRY(FindDeparted(m, m + 1, step));
      if (!Reached(m, step) && !Aborted()) {
        return PeerLost(ranks_[static_cast<size_t>(m)], "its process has ended");
      }
    }
    return Status();
  }

  Status Late(int first, int last, uint64_t step) const {
    std::string missing;
    for (int m = first; m < last; ++m) {
      if (Reached(m, step)) continue;
      missing +=
          (missing.empty() ? "rank " : ", rank ") + std::to_string(ranks_[static_cast<size_t>(m)]);
    }
    return Status(StatusCode::kTimeout, "arena step " + std::to_string(step) +
                                            " was not reached by " + missing +
                                            " when the deadline passed");
  }

  const std::shared_ptr<SharedMapping> mapping_;
  const int member_;
  const std::vector<int> ranks_;
  const size_t region_bytes_;
  const std::shared_ptr<const MemberWatches> watches_;
  const bool spins_;
};

}  // namespace

Result<std::shared_ptr<SharedMapping>> SharedMapping::Anonymous(size_t size) {
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return IoStatus("map " + std::to_string(size) + " bytes", errno);
  return std::shared_ptr<SharedMapping>(
      new SharedMapping(static_cast<std::byte*>(data), size, nullptr));
}

Result<std::shared_ptr<SharedMapping>> SharedMapping::OfFile(int fd, size_t size) {
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return IoStatus("map " + std::to_string(size) + " bytes of shared memory", errno);
  }
  return std::shared_ptr<SharedMapping>(
      new SharedMapping(static_cast<std::byte*>(data), size, nullptr));
}

std::shared_ptr<SharedMapping> SharedMapping::Part(std::shared_ptr<SharedMapping> whole,
                                                   size_t offset, size_t size) {
  std::byte* data = whole->data() + offset;
  return std::shared_ptr<SharedMapping>(new SharedMapping(data, size, std::move(whole)));
}

SharedMapping::~SharedMapping() {
  if (!whole_) ::munmap(data_, size_);
}

MemberWatches::MemberWatches(std::vector<MemberWatch> watches)
    : watches_(new std::vector<MemberWatch>(std::move(watches)),
               [](const std::vector<MemberWatch>* all) {
                 // A forked child may hold copies of these sockets, so closing alone would not end
                 // them.
                 for (const MemberWatch& watch : *all) {
                   if (watch.socket.valid()) ::shutdown(watch.socket.get(), SHUT_RDWR);
                 }
                 delete all;
               }),
      indices_(watches_->size()) {
  std::iota(indices_.begin(), indices_.end(), size_t{0});
}

std::shared_ptr<const MemberWatches> MemberWatches::Of(const std::vector<int>& members) const {
  auto part = std::make_shared<MemberWatches>(*this);
  part->indices_.clear();
  for (const int member : members) {
    part->indices_.push_back(indices_[static_cast<size_t>(member)]);
  }
  return part;
}

bool MemberWatch::Ended() const {
  // poll skips negative descriptors.
  std::array<pollfd, 2> fds = {{{socket.get(), POLLRDHUP, 0}, {process.get(), POLLIN, 0}}};
  if (::poll(fds.data(), fds.size(), 0) <= 0) return false;
  return (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 || (fds[1].revents & POLLIN) != 0;
}

size_t ArenaBytes(size_t count, size_t region_bytes) {
  return WholePages(RegionsOffset(count) + count * WholePages(region_bytes));
}

void FormatArena(SharedMapping& mapping, size_t count, size_t region_bytes) {
  auto* header = new (mapping.data()) ArenaHeader{};
  auto* slots = reinterpret_cast<MemberSlot*>(mapping.data() + sizeof(ArenaHeader));
  for (size_t m = 0; m < count; ++m) new (slots + m) MemberSlot{};
  header->count = count;
  header->region_bytes = WholePages(region_bytes);
  header->magic = kArenaMagic;
}

Status CheckArena(const SharedMapping& mapping, size_t count, size_t region_bytes) {
  const auto& header = *reinterpret_cast<const ArenaHeader*>(mapping.data());
  if (mapping.size() == ArenaBytes(count, region_bytes) && header.magic == kArenaMagic &&
      header.count == count && header.region_bytes == WholePages(region_bytes)) {
    return Status();
  }
  return Status(StatusCode::kInternal, "the shared memory does not hold an arena of " +
                                           std::to_string(count) + " regions of " +
                                           std::to_string(region_bytes) + " bytes");
}

std::unique_ptr<Arena> MakeSharedArena(std::shared_ptr<SharedMapping> mapping, int member,
                                       std::vector<int> ranks, size_t region_bytes,
                                       std::shared_ptr<const MemberWatches> watches) {
  return std::make_unique<SharedArena>(std::move(mapping), member, std::move(ranks), region_bytes,
                                       std::move(watches));
}

size_t ArenaPair::Bytes(size_t count, size_t region_bytes) {
  return ArenaBytes(count, region_bytes) + ArenaBytes(count, kDirectRegionBytes);
}

ArenaPair::ArenaPair(const std::shared_ptr<SharedMapping>& mapping, size_t count,
                     size_t region_bytes)
    : count_(count), region_bytes_(region_bytes) {
  const size_t first = ArenaBytes(count, region_bytes);
  arena_ = SharedMapping::Part(mapping, 0, first);
  direct_ = SharedMapping::Part(mapping, first, mapping->size() - first);
}

void ArenaPair::Format() {
  FormatArena(*arena_, count_, region_bytes_);
  FormatArena(*direct_, count_, kDirectRegionBytes);
}

Status ArenaPair::Check() const {
  SHVD_TRY(CheckArena(*arena_, count_, region_bytes_));
  return CheckArena(*direct_, count_, kDirectRegionBytes);
}

std::unique_ptr<Arena> ArenaPair::Join(int member, const std::vector<int>& ranks,
                                       const std::shared_ptr<const MemberWatches>& watches) const {
  return MakeSharedArena(arena_, member, ranks, region_bytes_, watches);
}

std::unique_ptr<Arena> ArenaPair::JoinDirect(
    int member, const std::vector<int>& ranks,
    const std::shared_ptr<const MemberWatches>& watches) const {
  return MakeSharedArena(direct_, member, ranks, kDirectRegionBytes, watches);
}

}  // namespace sparkhvd
