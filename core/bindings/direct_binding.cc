#include "bindings/direct_binding.h"

#include <string>

#include "base/dtype.h"
#include "bindings/errors.h"
#include "bindings/gil.h"

namespace sparkhvd::bindings {
namespace {

// The memory of an array for the time of a call. These calls take a few microseconds, so it is
// asked for without the detours that describe it in Python's terms.
class ArrayMemory {
 public:
  ArrayMemory(py::handle array, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ArrayMemory(const ArrayMemory&) = delete;
  ArrayMemory& operator=(const ArrayMemory&) = delete;
  ~ArrayMemory() { PyBuffer_Release(&view_); }

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t count() const { return static_cast<size_t>(view_.len / view_.itemsize); }

  // By the letters of the struct module.
  DType dtype() const {
    const std::string format = view_.format == nullptr ? "B" : view_.format;
    const std::string letters = "?BbHhilqefd";
    constexpr DType kTypes[] = {DType::kBool,    DType::kUInt8,   DType::kInt8,   DType::kUInt16,
                                DType::kInt16,   DType::kInt32,   DType::kInt64,  DType::kInt64,
                                DType::kFloat16, DType::kFloat32, DType::kFloat64};
    const size_t found = format.size() == 1 ? letters.find(format[0]) : std::string::npos;
    if (found == std::string::npos) {
      Check(Status(
          StatusCode::kInvalidArgument,
          "an array of format '" + format +
              "' cannot be reduced directly; numpy has bool, uint8, uint16, int8 to int64 and "
              "float16 to float64 in common with the core"));
    }
    return kTypes[found];
  }

 private:
  Py_buffer view_{};
};

void AllreduceNow(PyEngine& self, py::handle source, py::handle target, const std::string& op) {
  const ArrayMemory from(source, false);
  const ArrayMemory to(target, true);
  const std::optional<ReduceOp> parsed = ParseReduceOp(op);
  if (!parsed) Check(Status(StatusCode::kInvalidArgument, "there is no operator '" + op + "'"));
  const Reduction reduction{from.dtype(), *parsed, 1.0, 1.0};
  if (to.count() != from.count() || to.dtype() != reduction.dtype) {
    Check(Status(StatusCode::kInvalidArgument,
                 "the array for the result has another length or dtype than the array to reduce"));
  }
  if (reduction.dtype == DType::kBool && reduction.op == ReduceOp::kAverage) {
    Check(
        Status(StatusCode::kInvalidArgument, "bool has no average; use sum (or) or product (and)"));
  }
  if (reduction.op == ReduceOp::kAdasum) {
    Check(Status(StatusCode::kInvalidArgument, "there is no direct adasum; use allreduce"));
  }
  const auto interrupted = [&self] {
    const GilAcquire acquire;
    self.pending().DirectCallWaits();
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
