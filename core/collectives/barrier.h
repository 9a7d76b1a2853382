// A barrier of all ranks.
#pragma once

#include "base/deadline.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Returns once every rank has called it.
Status Barrier(Transport& transport, Deadline deadline);

}  // namespace sparkhvd
