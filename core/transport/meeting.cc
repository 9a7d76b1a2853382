#include "transport/meeting.h"

#include <algorithm>
#include <utility>

#include "base/failure_note.h"
#include "rendezvous/in_process_store.h"
#include "transport/failures.h"

namespace sparkhvd {
namespace {

constexpr std::chrono::milliseconds kSlice(100);
// Long enough for a server on another host, and short enough not to delay a failure.
constexpr double kBoardSeconds = 2.0;

}  // namespace

Status Meeting::Join() {
  const Status lost = PeerLost(rank_, "its process ended while the ranks were being connected");
  auto will = store_.LeaveWill(FailureKey(), EncodeFailure(lost), deadline_);
  if (!will.ok()) return will.status();
  will_ = std::move(will).value();
  return Status();
}

Status Meeting::Set(const std::string& key, const std::string& value) {
  return store_.Set(scope_ + "/" + key, value, deadline_);
}

Result<std::vector<std::string>> Meeting::GetAll(const std::string& what, NumberRange ranks) {
  const std::string prefix = scope_ + "/" + what + "/";
  while (true) {
    const Deadline slice =
        Deadline::After(std::min<std::chrono::nanoseconds>(kSlice, deadline_.Remaining()));
    auto values = store_.GetAll(prefix, ranks, slice);
    if (values.ok() || values.status().code() != StatusCode::kTimeout) return values;
    const Status others = Check();
    if (others.ok() && !deadline_.Expired()) continue;
    store_.StopAsking(prefix);
    return others.ok() ? FirstMissing(what, ranks, values.status()) : others;
  }
}

Status Meeting::FirstMissing(const std::string& what, NumberRange ranks, const Status& late) {
  const auto missing =
      store_.Missing(scope_ + "/" + what + "/", ranks, Deadline::AfterSeconds(kBoardSeconds));
  if (!missing.ok() || missing.value().empty()) return late;
  const std::string first = std::to_string(missing.value().front());
  return MissingKey(scope_ + "/" + what + "/" + first)
      .Annotate("rank " + std::to_string(rank_) + " waits for the " + what + " of rank " + first);
}

Status Meeting::Check() {
  if (interrupted_) SHVD_TRY(interrupted_().Annotate("rank " + std::to_string(rank_)));
  auto note = store_.Get(FailureKey(), Deadline::AfterSeconds(0));
  if (!note.ok()) return note.status().code() == StatusCode::kTimeout ? Status() : note.status();
  return DecodeFailure(note.value())
      .value_or(Status(StatusCode::kInternal, "another rank failed and gave no reason"));
}

void Meeting::Report(const std::string& key, const std::string& value) {
  (void)store_.Set(scope_ + "/" + key, value, Deadline::AfterSeconds(kBoardSeconds));
}

Status Meeting::Fail(const Status& own) {
  Leave();
  const Deadline deadline = Deadline::AfterSeconds(kBoardSeconds);
  if (!store_.Set(FailureKey(), EncodeFailure(own), deadline).ok()) return own;
  const auto first = store_.Get(FailureKey(), deadline);
  store_.StopAsking(FailureKey());
  if (!first.ok()) return own;
  return DecodeFailure(first.value()).value_or(own);
}

void Meeting::Leave() {
  if (will_) will_->Withdraw();
  will_.reset();
  store_.StopAsking(FailureKey());
}

}  // namespace sparkhvd
