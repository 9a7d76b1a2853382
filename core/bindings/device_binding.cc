#include "bindings/device_binding.h"

#include <string>

#include "bindings/errors.h"

namespace sparkhvd::bindings {

namespace py = pybind11;

void RegisterDevices(py::module_& module) {
  py::class_<DeviceLibraries>(module, "DeviceLibraries")
      .def(py::init([](const std::string& cuda, const std::string& nccl) {
             return Take(LoadDeviceLibraries(cuda, nccl));
           }),
           py::arg("cuda"), py::arg("nccl"));
  module.def(
      "nccl_version", [](const std::string& path) { return Take(LoadNccl(path))->version; },
      py::arg("path"));
}

}  // namespace sparkhvd::bindings
