#include "scheduler/negotiation.h"

#include <algorithm>
#include <chrono>
#include <iterator>

namespace sparkhvd {

RequestMessage Negotiation::Report(const std::vector<const Request*>& submitted) const {
  RequestMessage message;
  for (const Request* request : submitted) {
    if (const std::optional<uint32_t> id = cache_.Find(*request)) {
      message.cached.push_back(*id);
    } else {
      message.requests.push_back(*request);
    }
  }
  std::sort(message.cached.begin(), message.cached.end());
  return message;
}

void Negotiation::Remember(const Request& own, const std::vector<int64_t>& rows) {
  if (!cache_.Recurs(own.name)) return;
  if (const std::optional<uint32_t> id = cache_.NextId(own.name)) readiness_.Forget(*id, cache_);
  cache_.Insert(own, rows);
}

ResponseMessage Negotiation::Decide(Readiness::Time now, double timeout_s,
                                    const std::optional<Retuning>& retuning) {
  ResponseMessage response = readiness_.TakeComplete(cache_);
  response.retuning = retuning;
  const auto patience = std::chrono::duration_cast<Deadline::Clock::duration>(
      std::chrono::duration<double>(std::min(timeout_s, 3.0e9)));
  std::vector<Agreement> overdue = readiness_.TakeOverdue(cache_, now - patience);
  response.agreements.insert(response.agreements.end(), std::make_move_iterator(overdue.begin()),
                             std::make_move_iterator(overdue.end()));
  return response;
}

}  // namespace sparkhvd
