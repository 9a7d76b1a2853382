// How long something may wait for other ranks.
#pragma once

#include <functional>

#include "base/deadline.h"
#include "base/status.h"

namespace sparkhvd {

// Until the deadline, or until `trouble`, which is asked time and again, says why it is no use.
struct Waiting {
  Deadline deadline;
  std::function<Status()> trouble;
};

}  // namespace sparkhvd
