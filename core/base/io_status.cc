#include "base/io_status.h"

#include <system_error>

namespace sparkhvd {

std::string ErrorText(int error) { return std::system_category().message(error); }

Status IoStatus(const std::string& what, int error) {
  return Status(StatusCode::kIo, what + ": " + ErrorText(error), error);
}

}  // namespace sparkhvd
