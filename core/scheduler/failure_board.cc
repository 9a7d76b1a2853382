#include "scheduler/failure_board.h"

#include <utility>

#include "base/failure_note.h"

namespace sparkhvd {
namespace {

// Long enough for a server on another host, and short enough not to delay the failure of an
// operation.
constexpr double kSeconds = 2.0;

std::string NoteOf(const Status& status, int rank) {
  return EncodeFailure(status.Annotate("rank " + std::to_string(rank)));
}

}  // namespace

Status FailureBoard::First(const Status& own, int rank) const {
  if (!store) return own;
  const std::string note = NoteOf(own, rank);
  const Deadline deadline = Deadline::AfterSeconds(kSeconds);
  if (!store->Set(Key(), note, deadline).ok()) return own;
  const Result<std::string> first = store->Get(Key(), deadline);
  if (!first.ok() || first.value() == note) return own;
  return DecodeFailure(first.value()).value_or(own);
}

Status FailureBoard::Look() const {
  if (!store) return Status();
  const Result<std::string> note = store->Get(Key(), Deadline::AfterSeconds(0));
  return note.ok() ? DecodeFailure(note.value()).value_or(Status()) : Status();
}

// Rank 0 waits for all other ranks, and they wait for rank 0. Each rank sends a constant number of
// requests.
Status FailureBoard::AwaitAllDone(int rank, int size, Deadline deadline) const {
  if (!store || size == 1) return Status();
  const std::string all = scope + "/done";
  const std::string prefix = all + "/";
  if (rank != 0) {
    SHVD_TRY(store->Set(prefix + std::to_string(rank), "", deadline));
    const Status status = store->Get(all, deadline).status();
    if (!status.ok()) store->StopAsking(all);
    return status;
  }
  const Status status = store->GetAll(prefix, {1, static_cast<uint32_t>(size)}, deadline).status();
  if (!status.ok()) store->StopAsking(prefix);
  SHVD_TRY(status);
  return store->Set(all, "", deadline);
}

void FailureBoard::StopWatching() const {
  if (store) store->StopAsking(Key());
}

std::unique_ptr<Will> FailureBoard::LeaveWill(int rank) const {
  if (!store) return nullptr;
  const Status lost(StatusCode::kPeerLost, "its process has ended");
  auto will = store->LeaveWill(Key(), NoteOf(lost, rank), Deadline::AfterSeconds(kSeconds));
  return will.ok() ? std::move(will).value() : nullptr;
}

}  // namespace sparkhvd
