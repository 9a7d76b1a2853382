// Processes long data piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// Calls `visit` with consecutive parts of `whole`, each `length` bytes long except for the last,
// until a call fails.
template <typename Visit>
Status ForEachPiece(Bytes whole, size_t length, Visit visit) {
  for (size_t done = 0; done < whole.size(); done += length) {
    SHVD_TRY(visit(whole.Sub(done, std::min(length, whole.size() - done))));
  }
  return Status();
}

}  // namespace sparkhvd
