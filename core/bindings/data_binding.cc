#include "bindings/data_binding.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/array_memory.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "data/row_order.h"

namespace py = pybind11;

namespace sparkhvd::bindings {
namespace {

std::unique_ptr<RowOrder> MakeOrder(py::handle places, size_t rows) {
  const ArrayMemory memory(places, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  if (memory.format() != "l" && memory.format() != "q") {
    Check(Status(StatusCode::kInvalidArgument, "row indices must have dtype int64"));
  }
  const GilRelease release;
  const auto* begin = reinterpret_cast<const int64_t*>(memory.data());
  return std::make_unique<RowOrder>(Take(RowOrder::Make({begin, memory.count()}, rows)));
}

void Pick(const RowOrder& order, const py::list& columns, size_t row_bytes) {
  std::deque<ArrayMemory> memory;
  const auto bytes_of = [&memory](py::handle array, int flags) {
    return memory.emplace_back(array, flags).bytes();
  };
  std::vector<ColumnRows> rows;
  for (const py::handle column : columns) {
    const auto [parts, target] = column.cast<std::pair<py::list, py::object>>();
    ColumnRows& found = rows.emplace_back();
    for (const py::handle part : parts) found.parts.push_back(bytes_of(part, PyBUF_SIMPLE));
    found.target = bytes_of(target, PyBUF_WRITABLE);
  }
  const Status status = [&] {
    const GilRelease release;
    return order.Pick({rows.data(), rows.size()}, row_bytes);
  }();
  Check(status);
}

}  // namespace

void RegisterData(py::module_& module) {
  py::class_<RowOrder>(module, "RowOrder")
      .def(py::init(&MakeOrder), py::arg("places"), py::arg("rows"))
      .def("pick", &Pick, py::arg("columns"), py::arg("row_bytes"));
}

}  // namespace sparkhvd::bindings
