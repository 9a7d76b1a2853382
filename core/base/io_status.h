// Converts failures of system calls to Status values.
#pragma once

#include <string>

#include "base/status.h"

namespace sparkhvd {

// Returns the system's message for `error`, an errno value. Thread-safe.
std::string ErrorText(int error);

// Returns kIo with "<what>: <message>".
Status IoStatus(const std::string& what, int error);

}  // namespace sparkhvd
