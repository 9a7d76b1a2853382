#include "timeline/json_text.h"

#include <cstdio>

namespace sparkhvd {

std::string JsonText(const std::string& text) {
  std::string quoted = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      quoted += '\\';
      quoted += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(character));
      quoted += escape;
    } else {
      quoted += character;
    }
  }
  return quoted + '"';
}

}  // namespace sparkhvd
