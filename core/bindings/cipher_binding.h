// Registers LinkCipher, for connections whose frames are built in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace sparkhvd::bindings {

void RegisterCiphers(pybind11::module_& module);

}  // namespace sparkhvd::bindings
