// Text as a JSON string.
#pragma once

#include <string>

namespace sparkhvd {

// `text` in quotation marks, with everything escaped that JSON wants escaped.
std::string JsonText(const std::string& text);

}  // namespace sparkhvd
