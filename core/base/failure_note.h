// A failure as text in the store: the code as one character, then the message.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"

namespace sparkhvd {

std::string EncodeFailure(const Status& failure);

// Returns nothing unless `note` is a failure.
std::optional<Status> DecodeFailure(const std::string& note);

}  // namespace sparkhvd
