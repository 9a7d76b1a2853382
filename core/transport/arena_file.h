// The memory of an arena as an unnamed file, and the transfer of that file between processes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// Creates a memfd of `bytes` zero bytes with a fixed size. Reserves the memory now, so that no
// later store can fail.
Result<UniqueFd> CreateArenaFile(size_t bytes);

// Sends `file` over a Unix socket. -1 means that there is no file. `tag` is a number of the memory
// that both sides know.
Status SendArenaFile(int socket, int file, uint64_t tag, Deadline deadline);

// Discards files with other tags: a rank may have failed before it received them. Fails with kIo
// unless the sender has sent a file with a fixed size of `bytes` bytes.
Result<UniqueFd> ReceiveArenaFile(int socket, size_t bytes, uint64_t tag, Deadline deadline);

}  // namespace sparkhvd
