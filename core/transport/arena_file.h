// The memory of an arena as an unnamed file, and its transfer between processes.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// A memfd of `bytes` zero bytes with a fixed size, reserved now so that no later store into it can
// fail.
Result<UniqueFd> CreateArenaFile(size_t bytes);

// Sends `file` over a Unix socket; -1 means that there is none.
Status SendArenaFile(int socket, int file, Deadline deadline);

// kIo unless the sender has sent a file with a fixed size of `bytes` bytes.
Result<UniqueFd> ReceiveArenaFile(int socket, size_t bytes, Deadline deadline);

}  // namespace sparkhvd
