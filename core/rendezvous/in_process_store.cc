#include "rendezvous/in_process_store.h"

namespace sparkhvd {

Status MissingKey(const std::string& key) {
  return Status(StatusCode::kTimeout, "key '" + key + "' was not set before the deadline");
}

Status InProcessStore::Set(const std::string& key, const std::string& value,
                           Deadline /*deadline*/) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SHVD_TRY(closed_);
  if (values_.emplace(key, value).second) changed_.notify_all();
  return Status();
}

Result<std::string> InProcessStore::Get(const std::string& key, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    SHVD_TRY(closed_);
    const auto found = values_.find(key);
    if (found != values_.end()) return found->second;
    if (deadline.Expired()) return MissingKey(key);
    changed_.wait_until(lock, deadline.at());
  }
}

std::optional<std::string> InProcessStore::Find(const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

size_t InProcessStore::Erase(const std::string& prefix) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto first = values_.lower_bound(prefix);
  auto end = first;
  size_t count = 0;
  for (; end != values_.end() && end->first.compare(0, prefix.size(), prefix) == 0; ++end) ++count;
  values_.erase(first, end);
  return count;
}

void InProcessStore::Close(const Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = why;
  changed_.notify_all();
}

}  // namespace sparkhvd
