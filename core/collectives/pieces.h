// Work on long data piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// Calls `visit` with consecutive parts of `whole`, each of `length` bytes but for the last, until
// one call fails.
template <typename Visit>
Status ForEachPiece(Bytes whole, size_t length, Visit visit) {
  for (size_t done = 0; done < whole.size(); done += length) {
    SHVD_TRY(visit(whole.Sub(done, std::min(length, whole.size() - done))));
  }
  return Status();
}

}  // namespace sparkhvd
