// Shared libraries that are loaded at run time.
#pragma once

#include <string>

#include "base/status.h"

namespace sparkhvd {

// A shared library of this process. It is never unloaded, because CUDA's libraries leave threads
// and exit handlers behind.
class Library {
 public:
  // `path` is a file, or a name that the dynamic linker finds. Fails with kIo.
  static Result<Library> Open(const std::string& path);

  // Sets `function` to the library's function `name`. Fails with kIo if there is none.
  template <typename Function>
  Status Find(const char* name, Function*& function) const {
    void* found = nullptr;
    SHVD_TRY(FindSymbol(name, found));
    function = reinterpret_cast<Function*>(found);
    return Status();
  }

 private:
  Library(std::string path, void* handle) : path_(std::move(path)), handle_(handle) {}
  Status FindSymbol(const char* name, void*& found) const;

  std::string path_;
  void* handle_;
};

}  // namespace sparkhvd
