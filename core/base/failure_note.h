// Encodes a failure as text for the rendezvous: one character for the code, then the message.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"

namespace sparkhvd {

std::string EncodeFailure(const Status& failure);

// Returns nothing unless `note` encodes a failure.
std::optional<Status> DecodeFailure(const std::string& note);

}  // namespace sparkhvd
