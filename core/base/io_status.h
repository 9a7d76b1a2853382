// Failures of system calls as Status values.
#pragma once

#include <string>

#include "base/status.h"

namespace sparkhvd {

// The system's message for `error` (an errno value); safe from any thread.
std::string ErrorText(int error);

// kIo: "<what>: <message>".
Status IoStatus(const std::string& what, int error);

}  // namespace sparkhvd
