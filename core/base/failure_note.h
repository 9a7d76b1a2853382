// A failure as text that ranks leave for each other: the code as one character, then the message.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"

namespace sparkhvd {

std::string EncodeFailure(const Status& failure);

// Nothing where `note` is none.
std::optional<Status> DecodeFailure(const std::string& note);

}  // namespace sparkhvd
