#include "device/library.h"

#include <dlfcn.h>

namespace sparkhvd {
namespace {

std::string LastError() {
  const char* error = dlerror();
  return error == nullptr ? "no reason given" : error;
}

}  // namespace

Result<Library> Library::Open(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Status(StatusCode::kIo, "cannot load " + path + ": " + LastError());
  }
  return Library(path, handle);
}

Status Library::FindSymbol(const char* name, void*& found) const {
  found = dlsym(handle_, name);
  if (found != nullptr) return Status();
  return Status(StatusCode::kIo, path_ + " has no function " + name + ": " + LastError());
}

}  // namespace sparkhvd
