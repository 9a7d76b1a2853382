// Registers MessageServer and FrameConnection.
#pragma once

#include <pybind11/pybind11.h>

namespace sparkhvd::bindings {

void RegisterMessages(pybind11::module_& module);

}  // namespace sparkhvd::bindings
