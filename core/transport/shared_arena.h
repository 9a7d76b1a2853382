// An Arena in memory that several processes (in tests, several threads) have mapped.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "transport/arena.h"

namespace sparkhvd {

// A mapping of shared memory, which its owner unmaps.
class SharedMapping {
 public:
  // Maps anonymous memory for ranks that are threads of this process.
  static Result<std::shared_ptr<SharedMapping>> Anonymous(size_t size);
  // `fd` may be closed afterwards.
  static Result<std::shared_ptr<SharedMapping>> OfFile(int fd, size_t size);

  // Returns `size` bytes at `offset` of a mapping, and keeps the whole mapping alive.
  static std::shared_ptr<SharedMapping> Part(std::shared_ptr<SharedMapping> whole, size_t offset,
                                             size_t size);

  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  SharedMapping(std::byte* data, size_t size, std::shared_ptr<SharedMapping> whole)
      : data_(data), size_(size), whole_(std::move(whole)) {}
  std::byte* data_;
  size_t size_;
  std::shared_ptr<SharedMapping> whole_;  // null if this is the whole mapping
};

// Detects that the process of another member has ended without notice, by a connected socket that
// ends with the process, and by a pidfd. The pidfd is needed if a child of the process inherited
// the socket and keeps it open. Either may be missing.
struct MemberWatch {
  UniqueFd socket;
  UniqueFd process;

  // Checks once, without waiting.
  bool Ended() const;
};

// A waiter checks the processes of the missing members at this interval.
inline constexpr std::chrono::milliseconds kWatchInterval(50);

// One watch per member; this rank's own is empty. All that uses the shared memory of the same
// members shares the watches. When the last user is destroyed, the sockets are shut down, so that
// peers notice.
class MemberWatches {
 public:
  explicit MemberWatches(std::vector<MemberWatch> watches);

  // Returns the watches of some of these members, which become members 0, 1, 2...
  std::shared_ptr<const MemberWatches> Of(const std::vector<int>& members) const;

  size_t count() const { return indices_.size(); }
  bool Ended(int member) const { return At(member).Ended(); }
  // Returns the socket to another member, which carries the files of shared memory.
  int socket(int member) const { return At(member).socket.get(); }

 private:
  const MemberWatch& At(int member) const {
    return (*watches_)[indices_[static_cast<size_t>(member)]];
  }

  std::shared_ptr<const std::vector<MemberWatch>> watches_;
  std::vector<size_t> indices_;  // in watches_, by member
};

// Returns the bytes of an arena with `count` regions of `region_bytes`, each rounded up to whole
// pages. The result is a multiple of the page size.
size_t ArenaBytes(size_t count, size_t region_bytes);

// Writes the header of a new arena to zeroed memory. The creator calls it once, before other
// members map the memory.
void FormatArena(SharedMapping& mapping, size_t count, size_t region_bytes);

// Fails with kInternal unless `mapping` holds an arena of this shape.
Status CheckArena(const SharedMapping& mapping, size_t count, size_t region_bytes);

// `ranks` is sorted and holds the rank of every member. `watches` is null if the members are
// threads of one process.
std::unique_ptr<Arena> MakeSharedArena(std::shared_ptr<SharedMapping> mapping, int member,
                                       std::vector<int> ranks, size_t region_bytes,
                                       std::shared_ptr<const MemberWatches> watches);

// The memory of two consecutive arenas: the ranks' arena, and the arena for direct calls with its
// own region size.
class ArenaPair {
 public:
  // `mapping` must have Bytes(count, region_bytes) bytes.
  ArenaPair(const std::shared_ptr<SharedMapping>& mapping, size_t count, size_t region_bytes);

  static size_t Bytes(size_t count, size_t region_bytes);

  void Format();
  Status Check() const;

  std::unique_ptr<Arena> Join(int member, const std::vector<int>& ranks,
                              const std::shared_ptr<const MemberWatches>& watches) const;
  std::unique_ptr<Arena> JoinDirect(int member, const std::vector<int>& ranks,
                                    const std::shared_ptr<const MemberWatches>& watches) const;

 private:
  size_t count_;
  size_t region_bytes_;
  std::shared_ptr<SharedMapping> arena_;
  std::shared_ptr<SharedMapping> direct_;
};

}  // namespace sparkhvd
