// The extension module sparkhvd._core.
#include <pybind11/pybind11.h>

#include "bindings/data_binding.h"
#include "bindings/engine_binding.h"
#include "bindings/errors.h"
#include "bindings/message_binding.h"
#include "bindings/rendezvous_binding.h"

namespace py = pybind11;

namespace sparkhvd::bindings {

void RegisterErrors(py::module_& module) {
  const py::object type = py::reinterpret_steal<py::object>(
      PyErr_NewException("sparkhvd._core.CoreError", nullptr, nullptr));
  module.attr("CoreError") = type;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CoreFailure& failure) {
      // Look up the class on every use: a global reference to it would outlive the interpreter.
      const py::object error = py::module_::import("sparkhvd._core").attr("CoreError");
      const Status& status = failure.status();
      const py::object raised = error(StatusCodeName(status.code()), status.message());
      raised.attr("errno") = status.error_number();
      PyErr_SetObject(error.ptr(), raised.ptr());
    }
  });
}

}  // namespace sparkhvd::bindings

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core.";
  sparkhvd::bindings::RegisterErrors(module);
  sparkhvd::bindings::RegisterRendezvous(module);
  sparkhvd::bindings::RegisterMessages(module);
  sparkhvd::bindings::RegisterEngine(module);
  sparkhvd::bindings::RegisterData(module);
}
