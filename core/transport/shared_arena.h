// An Arena in memory that several processes (or several threads, in tests) have mapped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "transport/arena.h"

namespace sparkhvd {

// A mapping of shared memory, unmapped by its owner.
class SharedMapping {
 public:
  // Anonymous memory for ranks that are threads of this process.
  static Result<std::shared_ptr<SharedMapping>> Anonymous(size_t size);
  // `fd` may be closed afterwards.
  static Result<std::shared_ptr<SharedMapping>> OfFile(int fd, size_t size);

  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  SharedMapping(std::byte* data, size_t size) : data_(data), size_(size) {}
  std::byte* data_;
  size_t size_;
};

// How a member notices that another one has died without a word: a connected socket that ends with
// it, and a pidfd. The pidfd covers children that inherited the socket and keep it open. Either may
// be missing.
struct MemberWatch {
  UniqueFd socket;
  UniqueFd process;

  // Looks once, without waiting.
  bool Ended() const;
};

// The bytes of an arena with `count` regions of `region_bytes` (rounded up to whole pages).
size_t ArenaBytes(size_t count, size_t region_bytes);

// Writes the header of a fresh arena into zeroed memory; done once, by the creator, before anybody
// else maps it.
void FormatArena(SharedMapping& mapping, size_t count, size_t region_bytes);

// kInternal unless `mapping` holds an arena of this shape.
Status CheckArena(const SharedMapping& mapping, size_t count, size_t region_bytes);

// `ranks` is sorted and holds the rank of every member; `watches` has one entry per member (its own
// stays empty), or none at all where the members are threads of one process.
std::unique_ptr<Arena> MakeSharedArena(std::shared_ptr<SharedMapping> mapping, int member,
                                       std::vector<int> ranks, size_t region_bytes,
                                       std::vector<MemberWatch> watches);

}  // namespace sparkhvd
