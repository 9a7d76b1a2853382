#include "transport/arena_file.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/io_status.h"
#include "base/wire.h"
#include "rendezvous/socket.h"
#include "transport/memory_limit.h"

namespace sparkhvd {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A message of a tag, whether there is a file, and a descriptor.
struct FileMessage {
  FileMessage() {
    part.iov_base = content.data();
    part.iov_len = content.size();
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  FileMessage(const FileMessage&) = delete;
  FileMessage& operator=(const FileMessage&) = delete;

  std::array<std::byte, sizeof(uint64_t) + 1> content{};
  iovec part{};
  msghdr message{};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
};

// The kernel does not refuse to reserve more memory than is available; it kills other processes to
// free some. So this function checks the limit before the reservation.
Status CheckAffordable(size_t bytes) {
  const Result<uint64_t> memory = MemoryLimit();
  SHVD_TRY(memory.status());
  if (bytes <= memory.value() / 4) return Status();
  return Status(StatusCode::kIo,
                std::to_string(bytes) +
                    " bytes of shared memory exceed a quarter of this process's memory limit of " +
                    std::to_string(memory.value()) + " bytes");
}

UniqueFd TakeFile(msghdr* message) {
  UniqueFd file;
  for (cmsghdr* entry = CMSG_FIRSTHDR(message); entry != nullptr;
       entry = CMSG_NXTHDR(message, entry)) {
    if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS ||
        entry->cmsg_len != CMSG_LEN(sizeof(int))) {
      continue;
    }
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(entry), sizeof(fd));
    file.Reset(fd);
  }
  return file;
}

// Returns 0 or the error. A signal that this thread handles would undo the reservation, and a timer
// of a profiler could do so at every attempt.
int Reserve(int file, off_t bytes) {
  sigset_t all;
  sigset_t previous;
  ::sigfillset(&all);
  (void)::pthread_sigmask(SIG_SETMASK, &all, &previous);
  const int error = ::posix_fallocate(file, 0, bytes);
  (void)::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  return error;
}

}  // namespace

Result<UniqueFd> CreateArenaFile(size_t bytes) {
  SHVD_TRY(CheckAffordable(bytes));
  UniqueFd file(::memfd_create("sparkhvd-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return IoStatus("memfd_create", errno);
  const int error = Reserve(file.get(), static_cast<off_t>(bytes));
  if (error != 0) {
    return IoStatus("reserve " + std::to_string(bytes) + " bytes of shared memory", error);
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) return IoStatus("seal shared memory", errno);
  return file;
}

Status SendArenaFile(int socket, int file, uint64_t tag, Deadline deadline) {
  FileMessage parts;
  StoreLittleEndian(tag, parts.content.data());
  parts.content.back() = std::byte(file >= 0 ? 1 : 0);
  if (file >= 0) {
    cmsghdr* entry = CMSG_FIRSTHDR(&parts.message);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(entry), &file, sizeof(file));
  } else {
    parts.message.msg_control = nullptr;
    parts.message.msg_controllen = 0;
  }
  while (::sendmsg(socket, &parts.message, MSG_NOSIGNAL) < 0) {
    if (errno != EAGAIN && errno != EINTR) return IoStatus("send shared memory", errno);
    SHVD_TRY(AwaitEvents(socket, POLLOUT, deadline).Annotate("send shared memory"));
  }
  return Status();
}

Result<UniqueFd> ReceiveArenaFile(int socket, size_t bytes, uint64_t tag, Deadline deadline) {
  UniqueFd file;
  uint64_t received_tag = 0;
  do {
    FileMessage parts;
    ssize_t count = 0;
    while ((count = ::recvmsg(socket, &parts.message, MSG_CMSG_CLOEXEC)) < 0) {
      if (errno != EAGAIN && errno != EINTR) return IoStatus("receive shared memory", errno);
      SHVD_TRY(AwaitEvents(socket, POLLIN, deadline).Annotate("receive shared memory"));
    }
    file = TakeFile(&parts.message);
    if (count == 0) return Status(StatusCode::kIo, "the creator of the shared memory has ended");
    if (static_cast<size_t>(count) != parts.content.size()) {
      return Status(StatusCode::kIo, "the creator of the shared memory has sent half a message");
    }
    received_tag = LoadLittleEndian<uint64_t>(parts.content.data());
  } while (received_tag != tag);
  if (!file.valid()) return Status(StatusCode::kIo, "the creator could not share memory");
  struct stat info{};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (::fstat(file.get(), &info) != 0 || info.st_size != static_cast<off_t>(bytes) || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    return Status(StatusCode::kIo, "the received file is not shared memory with a fixed size of " +
                                       std::to_string(bytes) + " bytes");
  }
  return file;
}

}  // namespace sparkhvd
