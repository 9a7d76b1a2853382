#include "base/status.h"

namespace sparkhvd {

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
