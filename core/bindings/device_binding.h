// Registers DeviceLibraries, and the queries that need no device.
#pragma once

#include <pybind11/pybind11.h>

#include "device/libraries.h"

namespace sparkhvd::bindings {

void RegisterDevices(pybind11::module_& module);

}  // namespace sparkhvd::bindings
