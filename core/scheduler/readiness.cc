#include "scheduler/readiness.h"

#include <algorithm>
#include <utility>

namespace sparkhvd {

Status Readiness::Add(int rank, const RequestMessage& message, const ResponseCache& cache,
                      Time now) {
  for (const uint32_t id : message.cached) {
    if (!cache.Contains(id)) {
      return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " asks for operation " +
                                               std::to_string(id) + ", which nobody agreed on");
    }
    AddHit(rank, id, cache, now);
  }
  for (const Request& request : message.requests) {
    // The others may have asked for this name by its id: from here on it is negotiated in full.
    if (const auto id = cache.FindName(request.name)) Forget(*id, cache);
    AddRequest(rank, request, now);
  }
  return Status();
}

void Readiness::AddHit(int rank, uint32_t id, const ResponseCache& cache, Time now) {
  if (!by_name_.empty() && by_name_.count(cache.Own(id).name) > 0) {
    return AddRequest(rank, cache.OfRank(id, rank), now);
  }
  if (hits_.size() <= id) hits_.resize(id + 1);
  Hits& hits = hits_[id];
  if (hits.count == 0) {
    hits.ranks.assign(static_cast<size_t>(size_), false);
    hits.first = now;
    ++pending_hits_;
  }
  if (hits.ranks[static_cast<size_t>(rank)]) return;
  hits.ranks[static_cast<size_t>(rank)] = true;
  if (++hits.count == size_) {
    complete_.cached.push_back(id);
    hits.count = 0;
    --pending_hits_;
  }
}

void Readiness::AddRequest(int rank, const Request& request, Time now) {
  Waiting& waiting = by_name_[request.name];
  if (waiting.by_rank.empty()) {
    waiting.first = now;
    waiting.order = next_order_++;
  }
  waiting.by_rank[rank] = request;
  if (waiting.by_rank.size() == static_cast<size_t>(size_)) {
    complete_.agreements.push_back(Decide(request.name, waiting));
    by_name_.erase(request.name);
  }
}

void Readiness::Forget(uint32_t id, const ResponseCache& cache) {
  if (id >= hits_.size() || hits_[id].count == 0) return;
  const Hits hits = std::exchange(hits_[id], Hits{});
  --pending_hits_;
  for (int rank = 0; rank < size_; ++rank) {
    if (hits.ranks[static_cast<size_t>(rank)]) {
      AddRequest(rank, cache.OfRank(id, rank), hits.first);
    }
  }
}

Agreement Readiness::Decide(const std::string& name, const Waiting& waiting) const {
  Agreement agreement;
  agreement.name = name;
  const Request& first = waiting.by_rank.at(0);
  for (const auto& [rank, request] : waiting.by_rank) {
    if (const auto difference = Disagreement(first, 0, request, rank)) {
      agreement.code = StatusCode::kMismatch;
      agreement.message = *difference;
      return agreement;
    }
  }
  if (first.kind == OperationKind::kAllgather) {
    for (const auto& [rank, request] : waiting.by_rank) {
      agreement.first_dims.push_back(request.shape[0]);
    }
  }
  return agreement;
}

ResponseMessage Readiness::TakeComplete() {
  std::sort(complete_.cached.begin(), complete_.cached.end());
  return std::exchange(complete_, ResponseMessage{});
}

std::vector<Agreement> Readiness::TakeOverdue(const ResponseCache& cache, Time since) {
  for (uint32_t id = 0; pending_hits_ > 0 && id < hits_.size(); ++id) {
    if (hits_[id].count > 0 && hits_[id].first < since) Forget(id, cache);
  }
  std::vector<std::pair<uint64_t, Agreement>> overdue;
  for (auto entry = by_name_.begin(); entry != by_name_.end();) {
    const Waiting& waiting = entry->second;
    if (waiting.first >= since) {
      ++entry;
      continue;
    }
    std::vector<bool> present(static_cast<size_t>(size_), false);
    for (const auto& [rank, request] : waiting.by_rank) present[static_cast<size_t>(rank)] = true;
    Agreement agreement;
    agreement.name = entry->first;
    agreement.code = StatusCode::kTimeout;
    agreement.message = Missing(present);
    overdue.emplace_back(waiting.order, std::move(agreement));
    entry = by_name_.erase(entry);
  }
  std::sort(overdue.begin(), overdue.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Agreement> agreements;
  for (auto& [order, agreement] : overdue) agreements.push_back(std::move(agreement));
  return agreements;
}

std::string Readiness::Missing(const std::vector<bool>& present) const {
  std::string came;
  std::string missing;
  for (int rank = 0; rank < size_; ++rank) {
    std::string& list = present[static_cast<size_t>(rank)] ? came : missing;
    list += (list.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "not submitted by rank(s) " + missing + " while rank(s) " + came +
         " waited for the whole collective timeout";
}

}  // namespace sparkhvd
