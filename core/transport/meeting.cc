#include "transport/meeting.h"

#include <algorithm>
#include <utility>

#include "base/failure_note.h"
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

Result<std::string> Meeting::Get(const std::string& key) {
  while (true) {
    const Deadline slice =
        Deadline::After(std::min<std::chrono::nanoseconds>(kSlice, deadline_.Remaining()));
    auto value = store_.Get(scope_ + "/" + key, slice);
    if (value.ok() || value.status().code() != StatusCode::kTimeout) return value;
    const Status others = Check();
    if (others.ok() && !deadline_.Expired()) continue;
    store_.StopAsking(scope_ + "/" + key);
    return others.ok() ? value : Result<std::string>(others);
  }
}

Status Meeting::Check() {
  if (interrupted_) SHVD_TRY(interrupted_().Annotate("rank " + std::to_string(rank_)));
  auto note = store_.Get(FailureKey(), Deadline::AfterSeconds(0));
  if (!note.ok()) return note.status().code() == StatusCode::kTimeout ? Status() : note.status();
  return DecodeFailure(note.value())
      .value_or(Status(StatusCode::kInternal, "another rank failed and gave no reason"));
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
