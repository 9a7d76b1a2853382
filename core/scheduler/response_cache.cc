#include "scheduler/response_cache.h"

namespace sparkhvd {
namespace {

// Returns the FNV-1a hash, but never 0. Unlike std::hash, it is the same on all ranks, which must
// store the same agreements.
uint64_t HashOf(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : name) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return hash == 0 ? 1 : hash;
}

}  // namespace

std::optional<uint32_t> ResponseCache::Find(const Request& request) const {
  const std::optional<uint32_t> id = FindName(request.name);
  return id && entries_[*id].own == request ? id : std::nullopt;
}

std::optional<uint32_t> ResponseCache::FindName(const std::string& name) const {
  const auto found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional<uint32_t>(found->second);
}

Request ResponseCache::OfRank(uint32_t id, int rank) const {
  Request request = entries_[id].own;
  const std::vector<int64_t>& rows = entries_[id].rows;
  const auto index = static_cast<size_t>(rank);
  if (request.kind == OperationKind::kAllgather) request.shape[0] = rows[index];
  return request;
}

bool ResponseCache::Recurs(const std::string& name) {
  if (FindName(name)) return true;
  if (seen_.empty()) return false;
  const uint64_t hash = HashOf(name);
  const auto slot_of = [&] {  // half of the slots are free, so this ends soon
    size_t slot = hash % seen_.size();
    while (seen_[slot] != 0 && seen_[slot] != hash) slot = (slot + 1) % seen_.size();
    return slot;
  };
  if (seen_[slot_of()] == hash) return true;
  if (seen_count_ == seen_.size() / 2) {
    std::fill(seen_.begin(), seen_.end(), 0);
    seen_count_ = 0;
  }
  seen_[slot_of()] = hash;
  ++seen_count_;
  return false;
}

std::optional<uint32_t> ResponseCache::NextId(const std::string& name) const {
  if (capacity_ == 0) return std::nullopt;
  if (const std::optional<uint32_t> id = FindName(name)) return id;
  if (entries_.size() < capacity_) return static_cast<uint32_t>(entries_.size());
  return recent_.back();
}

void ResponseCache::Insert(const Request& own, const std::vector<int64_t>& rows) {
  const std::optional<uint32_t> id = NextId(own.name);
  if (!id) return;
  if (*id == entries_.size()) entries_.emplace_back();
  Entry& entry = entries_[*id];
  if (entry.used) {
    ids_.erase(entry.own.name);
    recent_.erase(entry.position);
  }
  recent_.push_front(*id);
  ids_[own.name] = *id;
  entry = Entry{true, own, rows, recent_.begin()};
  entry.own.splits = {};
}

void ResponseCache::Touch(uint32_t id) {
  recent_.splice(recent_.begin(), recent_, entries_[id].position);
}

}  // namespace sparkhvd
