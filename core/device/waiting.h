// The limits of a wait for other ranks.
#pragma once

#include <functional>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// A wait lasts until the deadline, or until `check`, which is called repeatedly, returns a failure.
struct Waiting {
  Deadline deadline;
  std::function<Status()> check;
};

}  // namespace sparkhvd
