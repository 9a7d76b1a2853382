// Access to the memory of arrays during a call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "base/span.h"

namespace sparkhvd::bindings {

// The contiguous memory of one array. Some calls take only a few microseconds, so this class avoids
// py::buffer_info, which creates Python objects.
class ArrayMemory {
 public:
  // `flags` are those of the buffer protocol. Omit PyBUF_FORMAT to read an array of any dtype as
  // bytes: for some dtypes, such as datetime64, NumPy provides no format.
  ArrayMemory(pybind11::handle array, int flags) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ArrayMemory(const ArrayMemory&) = delete;
  ArrayMemory& operator=(const ArrayMemory&) = delete;
  ~ArrayMemory() { PyBuffer_Release(&view_); }

  Bytes bytes() const { return {data(), static_cast<size_t>(view_.len)}; }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t count() const {
    return view_.itemsize > 0 ? static_cast<size_t>(view_.len / view_.itemsize) : 0;
  }
  // Returns the type of the elements as a format of Python's struct module.
  std::string format() const { return view_.format == nullptr ? "B" : view_.format; }

 private:
  Py_buffer view_{};
};

}  // namespace sparkhvd::bindings
