#include "bindings/direct_binding.h"

#include <string>

#include "base/dtype.h"
#include "bindings/array_memory.h"
#include "bindings/errors.h"
#include "bindings/gil.h"

namespace sparkhvd::bindings {
namespace {

DType DTypeOf(const ArrayMemory& array) {
  const std::string format = array.format();
  const std::string letters = "?BbHhilqefd";
  constexpr DType kTypes[] = {DType::kBool,    DType::kUInt8,   DType::kInt8,   DType::kUInt16,
                              DType::kInt16,   DType::kInt32,   DType::kInt64,  DType::kInt64,
                              DType::kFloat16, DType::kFloat32, DType::kFloat64};
  const size_t index = format.size() == 1 ? letters.find(format[0]) : std::string::npos;
  if (index == std::string::npos) {
    Check(Status(
        StatusCode::kInvalidArgument,
        "an array of format '" + format +
            "' cannot be reduced directly; use bool, uint8, uint16, int8 to int64 or float16 to "
            "float64"));
  }
  return kTypes[index];
}

void AllreduceNow(PyEngine& self, py::handle source, py::handle target, const std::string& op) {
  const ArrayMemory from(source, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  const ArrayMemory to(target, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE);
  const std::optional<ReduceOp> parsed = ParseReduceOp(op);
  if (!parsed) Check(Status(StatusCode::kInvalidArgument, "unknown op '" + op + "'"));
  const Reduction reduction{DTypeOf(from), *parsed, 1.0, 1.0};
  if (to.count() != from.count() || DTypeOf(to) != reduction.dtype) {
    Check(Status(StatusCode::kInvalidArgument,
                 "the array for the result must have the length and dtype of the array to reduce"));
  }
  if (reduction.dtype == DType::kBool && reduction.op == ReduceOp::kAverage) {
    Check(
        Status(StatusCode::kInvalidArgument, "bool has no average; use sum (or) or product (and)"));
  }
  if (reduction.op == ReduceOp::kAdasum) {
    Check(Status(StatusCode::kInvalidArgument,
                 "allreduce_now does not support adasum; use allreduce"));
  }
  // Only the main thread waits for the GIL here. While the interpreter shuts down, any other thread
  // would wait forever, and so would a shutdown of the engine, which waits for the end of this
  // call.
  const auto interrupted = [&self] {
    self.pending().DirectCallWaits();
    if (!self.main_thread().IsThisThread()) return false;
    const GilAcquire acquire;
    return PyErr_CheckSignals() != 0;
  };
  const Status status = [&] {
    const GilRelease release;
    return self.engine().AllreduceNow(reduction, from.data(), to.data(), from.count(), interrupted);
  }();
  self.pending().DirectCallEnded();
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  Check(status);
}

}  // namespace

void RegisterDirectCalls(EngineClass& engine) {
  engine.def("has_direct_calls", [](PyEngine& self) { return self.engine().has_direct_calls(); })
      .def("allreduce_now", &AllreduceNow, py::arg("source"), py::arg("target"), py::arg("op"));
}

}  // namespace sparkhvd::bindings
