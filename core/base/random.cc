#include "base/random.h"

#include <sys/random.h>

#include <cerrno>

#include "base/io_status.h"

namespace sparkhvd {

Status FillRandom(Bytes out) {
  size_t filled = 0;
  while (filled < out.size()) {
    const ssize_t count = ::getrandom(out.data() + filled, out.size() - filled, 0);
    if (count < 0) {
      if (errno == EINTR) continue;
      return IoStatus("getrandom", errno);
    }
    filled += static_cast<size_t>(count);
  }
  return Status();
}

}  // namespace sparkhvd
