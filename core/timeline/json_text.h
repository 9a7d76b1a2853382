// Text as a JSON string.
#pragma once

#include <string>

namespace sparkhvd {

// Returns `text` in quotation marks, with everything escaped that JSON requires.
std::string JsonText(const std::string& text);

}  // namespace sparkhvd
