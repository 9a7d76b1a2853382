// Registers Engine and Operation.
#pragma once

#include <pybind11/pybind11.h>

namespace sparkhvd::bindings {

void RegisterEngine(pybind11::module_& module);

}  // namespace sparkhvd::bindings
