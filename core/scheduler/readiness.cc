#include "scheduler/readiness.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/failures.h"

namespace sparkhvd {

Status Readiness::Add(int rank, const RequestMessage& message, const ResponseCache& cache,
                      Time now) {
  for (const uint32_t id : message.cached) {
    if (!cache.Contains(id)) {
      return Status(StatusCode::kInternal, "rank " + std::to_string(rank) +
                                               " requests cached operation " + std::to_string(id) +
                                               ", which the ranks have not agreed on");
    }
    AddHit(rank, id, cache, now);
  }
  for (const Request& request : message.requests) {
    if (request.kind == OperationKind::kJoin) {
      AddJoin(rank);
      continue;
    }
    // Other ranks may have requested this name by its id. From now on, the name is negotiated in
    // full.
    if (const auto id = cache.FindName(request.name)) Forget(*id, cache);
    AddRequest(rank, request, now);
  }
  return Status();
}

void Readiness::AddHit(int rank, uint32_t id, const ResponseCache& cache, Time now) {
  const bool in_full = !by_name_.empty() && by_name_.count(cache.Own(id).name) > 0;
  if (in_full || joined_count_ > 0) {
    Forget(id, cache);
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
    complete_hits_.push_back(id);
    groups_complete_ = groups_complete_ || !cache.Own(id).group.empty();
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
  if (IsComplete(waiting)) {
    decided_.push_back(Decide(request.name, waiting));
    by_name_.erase(request.name);
  }
}

void Readiness::AddJoin(int rank) {
  if (joined_[static_cast<size_t>(rank)]) return;
  joined_[static_cast<size_t>(rank)] = true;
  ++joined_count_;
  last_joined_ = rank;
  joins_changed_ = true;
}

bool Readiness::IsComplete(const Waiting& waiting) const {
  if (joined_count_ == 0) return waiting.by_rank.size() == static_cast<size_t>(size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (!joined_[static_cast<size_t>(rank)] && waiting.by_rank.count(rank) == 0) return false;
  }
  return true;
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

// Completes the operations that waited only for ranks that have joined.
void Readiness::CompleteForJoined(const ResponseCache& cache) {
  for (uint32_t id = 0; pending_hits_ > 0 && id < hits_.size(); ++id) Forget(id, cache);
  std::vector<std::pair<uint64_t, std::string>> complete;
  for (const auto& [name, waiting] : by_name_) {
    if (IsComplete(waiting)) complete.emplace_back(waiting.order, name);
  }
  std::sort(complete.begin(), complete.end());
  for (const auto& [order, name] : complete) {
    decided_.push_back(Decide(name, by_name_.at(name)));
    by_name_.erase(name);
  }
}

Readiness::Decided Readiness::Decide(const std::string& name, const Waiting& waiting) const {
  Decided decided;
  decided.agreement.name = name;
  const auto& [first_rank, first] = *waiting.by_rank.begin();
  std::set<std::string> groups;
  for (const auto& [rank, request] : waiting.by_rank) {
    if (!request.group.empty()) groups.insert(request.group);
    const auto difference = Disagreement(first, first_rank, request, rank);
    if (difference && decided.agreement.code == StatusCode::kOk) {
      decided.agreement.code = StatusCode::kMismatch;
      decided.agreement.message = *difference;
    }
  }
  decided.groups.assign(groups.begin(), groups.end());
  decided.group_size = first.group_size;
  if (decided.agreement.code == StatusCode::kOk) DecideRows(decided.agreement, waiting);
  return decided;
}

// Returns what an operation needs from ranks that have joined, if anything.
std::optional<std::string> Readiness::NeededFromJoined(const Waiting& waiting) {
  const Request& asked = waiting.by_rank.begin()->second;
  switch (asked.kind) {
    case OperationKind::kAllreduce:
    case OperationKind::kAllgather:
    case OperationKind::kBarrier:
    case OperationKind::kJoin:
      return std::nullopt;
    case OperationKind::kBroadcast:
      if (waiting.by_rank.count(asked.root) == 0) return "the data of its root, which has joined";
      break;
    case OperationKind::kReducescatter:
      break;
    case OperationKind::kAlltoall:
      return "the data of every rank";
  }
  if (asked.on_device) return "device memory of every rank";
  return std::nullopt;
}

void Readiness::DecideRows(Agreement& agreement, const Waiting& waiting) const {
  const Request& first = waiting.by_rank.begin()->second;
  if (waiting.by_rank.size() < static_cast<size_t>(size_)) {
    if (const auto needed = NeededFromJoined(waiting)) {
      agreement.code = StatusCode::kInvalidArgument;
      agreement.message = "some ranks have joined, but this operation needs " + *needed;
      return;
    }
    agreement.request = first;
  }
  if (first.kind == OperationKind::kAllgather) {
    for (int rank = 0; rank < size_; ++rank) {
      const auto found = waiting.by_rank.find(rank);
      agreement.rows.push_back(found == waiting.by_rank.end() ? 0 : found->second.shape[0]);
    }
  }
}

ResponseMessage Readiness::TakeComplete(const ResponseCache& cache) {
  if (std::exchange(joins_changed_, false)) CompleteForJoined(cache);
  for (const Decided& decided : decided_) {
    groups_complete_ = groups_complete_ || !decided.groups.empty();
  }
  if (std::exchange(groups_complete_, false)) DecideGroups(cache);
  ResponseMessage response;
  response.cached = std::exchange(complete_hits_, {});
  std::sort(response.cached.begin(), response.cached.end());
  for (Decided& decided : decided_) response.agreements.push_back(std::move(decided.agreement));
  decided_.clear();
  if (joined_count_ == size_) {
    Agreement agreement;
    agreement.name = kJoinName;
    agreement.rows = {last_joined_};
    response.agreements.push_back(std::move(agreement));
    joined_.assign(static_cast<size_t>(size_), false);
    joined_count_ = 0;
  }
  return response;
}

void Readiness::DecideGroups(const ResponseCache& cache) {
  std::map<std::string, Tally> tallies;
  for (const uint32_t id : complete_hits_) {
    const Request& request = cache.Own(id);
    if (request.group.empty()) continue;
    Tally& tally = tallies[request.group];
    ++tally.complete;
    tally.size = request.group_size;
  }
  for (const Decided& decided : decided_) {
    for (const std::string& group : decided.groups) {
      Tally& tally = tallies[group];
      ++tally.complete;
      tally.size = decided.group_size;
      const Agreement& agreement = decided.agreement;
      if (agreement.code != StatusCode::kOk && tally.problem.empty()) {
        tally.problem = "'" + agreement.name + "': " + agreement.message;
      }
    }
  }
  for (const auto& [group, tally] : tallies) {
    if (!tally.problem.empty() || tally.complete != tally.size) RefuseGroup(group, tally, cache);
  }
}

// Returns the names of a group's incomplete operations, and forgets the group.
std::vector<std::string> Readiness::TakeWaitingOf(const std::string& group,
                                                  const ResponseCache& cache) {
  for (uint32_t id = 0; pending_hits_ > 0 && id < hits_.size(); ++id) {
    if (hits_[id].count > 0 && cache.Own(id).group == group) Forget(id, cache);
  }
  std::vector<std::string> names;
  for (auto entry = by_name_.begin(); entry != by_name_.end();) {
    const auto& by_rank = entry->second.by_rank;
    const bool inside = std::any_of(by_rank.begin(), by_rank.end(),
                                    [&](const auto& asked) { return asked.second.group == group; });
    if (inside) names.push_back(entry->first);
    entry = inside ? by_name_.erase(entry) : std::next(entry);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void Readiness::RefuseGroup(const std::string& group, const Tally& tally,
                            const ResponseCache& cache) {
  const std::vector<std::string> waiting = TakeWaitingOf(group, cache);
  std::string why = "its group '" + group + "' cannot run: ";
  if (!tally.problem.empty()) {
    why += tally.problem;
  } else {
    why += "ranks disagree about its tensors (size " + std::to_string(tally.size) + ")";
    if (!waiting.empty()) why += "; not all ranks submitted '" + waiting.front() + "'";
  }
  const auto refuse = [&](const std::string& name) {
    Decided refused;
    refused.agreement.name = name;
    refused.agreement.code = StatusCode::kMismatch;
    refused.agreement.message = why;
    return refused;
  };
  for (Decided& decided : decided_) {
    const auto& groups = decided.groups;
    const bool inside = std::find(groups.begin(), groups.end(), group) != groups.end();
    if (inside && decided.agreement.code == StatusCode::kOk) {
      decided = refuse(decided.agreement.name);
    }
  }
  const auto outside = [&](uint32_t id) { return cache.Own(id).group != group; };
  const auto inside = std::stable_partition(complete_hits_.begin(), complete_hits_.end(), outside);
  for (auto id = inside; id != complete_hits_.end(); ++id) {
    decided_.push_back(refuse(cache.Own(*id).name));
  }
  complete_hits_.erase(inside, complete_hits_.end());
  for (const std::string& name : waiting) decided_.push_back(refuse(name));
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
  std::vector<int> waiting;
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    (present[static_cast<size_t>(rank)] ? waiting : missing).push_back(rank);
  }
  return "not submitted by " + RankNames(missing) + " while " + RankNames(waiting) +
         " waited for the whole collective timeout";
}

}  // namespace sparkhvd
