#include "scheduler/response_cache.h"

namespace sparkhvd {

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
