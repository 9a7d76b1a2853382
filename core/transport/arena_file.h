// The memory of an arena as a file without a name, and its way from process to process.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// A memfd of `bytes` zero bytes, reserved now (so that no store into it can fail later) and fixed
// in size.
Result<UniqueFd> CreateArenaFile(size_t bytes);

// Sends `file` over a Unix socket; -1 tells the receiver that there is none.
Status SendArenaFile(int socket, int file, Deadline deadline);

// kIo when the sender has none or what came is not a file of `bytes` bytes fixed in size.
Result<UniqueFd> ReceiveArenaFile(int socket, size_t bytes, Deadline deadline);

}  // namespace sparkhvd
