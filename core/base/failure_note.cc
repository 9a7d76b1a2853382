#include "base/failure_note.h"

namespace sparkhvd {
namespace {

constexpr char kFirst = 'A';  // stands for kOk, which is not a failure
constexpr char kLast = static_cast<char>(kFirst + static_cast<int>(StatusCode::kInternal));

}  // namespace

std::string EncodeFailure(const Status& failure) {
  return std::string(1, static_cast<char>(kFirst + static_cast<int>(failure.code()))) +
         failure.message();
}

std::optional<Status> DecodeFailure(const std::string& note) {
  if (note.empty() || note[0] <= kFirst || note[0] > kLast) return std::nullopt;
  return Status(static_cast<StatusCode>(note[0] - kFirst), note.substr(1));
}

}  // namespace sparkhvd
