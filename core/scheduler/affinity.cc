#include "scheduler/affinity.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>

#include "base/io_status.h"

namespace sparkhvd {

Status PinThisThread(int core) {
  const std::string name = "core " + std::to_string(core);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (core >= 0 && core < CPU_SETSIZE) CPU_SET(static_cast<size_t>(core), &cores);
  if (::sched_setaffinity(0, sizeof(cores), &cores) == 0) return Status();
  if (errno != EINVAL) return IoStatus("pin a thread to " + name, errno);
  const std::string there = std::to_string(::sysconf(_SC_NPROCESSORS_CONF));
  return Status(StatusCode::kInvalidArgument,
                "a thread cannot be pinned to " + name + ": this host has " + there +
                    " cores, numbered from 0, and this process may be limited to some of them");
}

Status CheckProcessorCore(int core) {
  Status status;
  std::thread([&] { status = PinThisThread(core); }).join();
  return status;
}

}  // namespace sparkhvd
