// Registers RowOrder.
#pragma once

#include <pybind11/pybind11.h>

namespace sparkhvd::bindings {

void RegisterData(pybind11::module_& module);

}  // namespace sparkhvd::bindings
