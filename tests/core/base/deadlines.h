// Deadlines of tests: one that is meant to pass, and one that is not.
#pragma once

#include <chrono>

#include "base/deadline.h"

namespace sparkhvd {

inline Deadline Soon() { return Deadline::After(std::chrono::milliseconds(30)); }
inline Deadline Late() { return Deadline::AfterSeconds(60); }

}  // namespace sparkhvd
