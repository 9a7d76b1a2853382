#include "base/status.h"

#include <new>

namespace sparkhvd {
namespace {

// Fits into std::string's small buffer, so a string with this message needs no allocation.
constexpr char kOutOfMemory[] = "out of memory";
static_assert(sizeof(kOutOfMemory) <= 16);

}  // namespace

Status AnnotateIfPossible(const Status& status, std::string_view context) noexcept {
  try {
    return context.empty() ? status : status.Annotate(context);
  } catch (...) {  // retry with a shorter message
  }
  try {
    return status;
  } catch (...) {
    return Status(status.code(), kOutOfMemory);
  }
}

Status StatusOf(const std::exception& error) noexcept {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return Status(StatusCode::kIo, kOutOfMemory);
  }
  try {
    return Status(StatusCode::kInternal, error.what());
  } catch (...) {
    return Status(StatusCode::kIo, kOutOfMemory);
  }
}

const char* StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kMismatch:
      return "mismatch";
    case StatusCode::kTimeout:
      return "timeout";
    case StatusCode::kAborted:
      return "aborted";
    case StatusCode::kPeerLost:
      return "peer_lost";
    case StatusCode::kIo:
      return "io";
    case StatusCode::kAuthentication:
      return "authentication";
    case StatusCode::kShutDown:
      return "shut_down";
    case StatusCode::kInternal:
      return "internal";
  }
  return "internal";
}

}  // namespace sparkhvd
