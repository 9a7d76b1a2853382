// The memory of an arena as an unnamed file, and the transfer of that file between processes.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// Creates a memfd of `bytes` zero bytes with a fixed size. Reserves the memory now, so that no
// later store can fail.
Result<UniqueFd> CreateArenaFile(size_t bytes);

// Sends `file` over a Unix socket. -1 means that there is no file.
Status SendArenaFile(int socket, int file, Deadline deadline);

// Fails with kIo unless the sender has sent a file with a fixed size of `bytes` bytes.
Result<UniqueFd> ReceiveArenaFile(int socket, size_t bytes, Deadline deadline);

}  // namespace sparkhvd
