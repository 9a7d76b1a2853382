#include "bindings/submission_binding.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/py_engine.h"

namespace sparkhvd::bindings {
namespace {

using Shape = std::vector<int64_t>;
using EnginePointer = std::shared_ptr<PyEngine>;
using HandlePointer = std::unique_ptr<Handle>;

// The CUDA device that holds the buffers, by its number, and the address of the stream that writes
// the input. Empty for host memory.
using DeviceAndStream = std::optional<std::pair<int, uintptr_t>>;

// One tensor of a group: name, source, target (ignored by an allgather), shape, dtype, keep_alive.
using Tensor = std::tuple<std::string, uintptr_t, uintptr_t, Shape, std::string, py::object>;

DType ToDType(std::string_view name) {
  if (const std::optional<DType> dtype = ParseDType(name)) return *dtype;
  std::string known;
  for (size_t index = 0; index < kDTypeCount; ++index) {
    known += (index == 0 ? "" : ", ") + std::string(Name(static_cast<DType>(index)));
  }
  throw CoreFailure(Status(StatusCode::kInvalidArgument,
                           "unknown dtype '" + std::string(name) + "'; expected one of " + known));
}

ReduceOp ToReduceOp(std::string_view name) {
  if (const std::optional<ReduceOp> op = ParseReduceOp(name)) return *op;
  throw CoreFailure(Status(StatusCode::kInvalidArgument,
                           "unknown op '" + std::string(name) +
                               "'; expected one of sum, average, min, max, product, adasum"));
}

// Python passes addresses as integers: tensor.data_ptr(), array.ctypes.data.
std::byte* ToPointer(uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT: the caller's contract
}

std::optional<DeviceStream> ToDeviceStream(const DeviceAndStream& device) {
  if (!device) return std::nullopt;
  return DeviceStream{device->first, reinterpret_cast<CudaStream>(device->second)};  // NOLINT
}

// Releases the GIL for device memory, because a call to the CUDA driver may block and the first
// call creates a context. For host memory, releasing the GIL would take longer than the submission.
std::unique_ptr<GilRelease> ReleaseGilFor(const DeviceAndStream& device) {
  return device ? std::make_unique<GilRelease>() : nullptr;
}

// Faster than pybind11's generic conversion of sequences. Every submission converts a shape.
Shape ToShape(const py::tuple& lengths) {
  Shape shape(lengths.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    const auto index = static_cast<py::ssize_t>(i);
    shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(lengths.ptr(), index));
    if (shape[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return shape;
}

// The factors that scale the input and the result of a reduction.
struct Scales {
  double prescale;
  double postscale;
};

Request MakeRequest(OperationKind kind, std::string name, Shape shape, std::string_view dtype) {
  Request request;
  request.kind = kind;
  request.name = std::move(name);
  request.shape = std::move(shape);
  request.dtype = ToDType(dtype);
  return request;
}

void SetReduction(Request& request, std::string_view op, Scales scales) {
  request.op = ToReduceOp(op);
  request.prescale = scales.prescale;
  request.postscale = scales.postscale;
}

Start ToStart(bool with_waiter) { return with_waiter ? Start::kWithWaiter : Start::kNow; }

HandlePointer MakeHandle(const EnginePointer& engine, std::shared_ptr<Operation> operation,
                         py::object keep_alive) {
  try {
    engine->pending().Add(operation);
    return std::make_unique<Handle>(engine, std::move(operation), keep_alive);
  } catch (...) {
    keep_alive.release();  // leak it: the engine uses the buffers, and no handle keeps them alive
    throw;
  }
}

HandlePointer Submit(const EnginePointer& engine, Request request, uintptr_t source,
                     uintptr_t target, py::object keep_alive, bool with_waiter,
                     const DeviceAndStream& device) {
  engine->orphans().ReleaseDone();
  Result<std::shared_ptr<Operation>> operation = [&] {
    const auto release = ReleaseGilFor(device);
    return engine->engine().Submit(std::move(request), ToPointer(source), ToPointer(target),
                                   ToStart(with_waiter), ToDeviceStream(device));
  }();
  return MakeHandle(engine, Take(std::move(operation)), std::move(keep_alive));
}

// `complete` sets the fields that are equal in all requests of the group.
template <typename Complete>
std::vector<HandlePointer> SubmitGroup(const EnginePointer& engine, OperationKind kind,
                                       const std::string& group, std::vector<Tensor> tensors,
                                       bool with_waiter, const DeviceAndStream& device,
                                       const Complete& complete) {
  engine->orphans().ReleaseDone();
  std::vector<Engine::Submission> submissions;
  for (const auto& [name, source, target, shape, dtype, keep_alive] : tensors) {
    Request request = MakeRequest(kind, name, shape, dtype);
    request.group = group;
    request.group_size = static_cast<uint32_t>(tensors.size());
    complete(request);
    submissions.push_back(
        {std::move(request), ToPointer(source), ToPointer(target), ToDeviceStream(device)});
  }
  Result<std::vector<std::shared_ptr<Operation>>> submitted = [&] {
    const auto release = ReleaseGilFor(device);
    return engine->engine().SubmitAll(std::move(submissions), ToStart(with_waiter));
  }();
  std::vector<std::shared_ptr<Operation>> operations = Take(std::move(submitted));
  std::vector<HandlePointer> handles;
  size_t made = 0;
  try {
    handles.reserve(operations.size());
    for (; made < operations.size(); ++made) {
      handles.push_back(MakeHandle(engine, std::move(operations[made]),
                                   std::move(std::get<py::object>(tensors[made]))));
    }
  } catch (...) {  // leak the rest, as in MakeHandle
    for (++made; made < operations.size(); ++made) std::get<py::object>(tensors[made]).release();
    throw;
  }
  return handles;
}

template <OperationKind kKind>
HandlePointer Reduce(const EnginePointer& engine, std::string name, uintptr_t source,
                     uintptr_t target, const py::tuple& shape, std::string_view dtype,
                     std::string_view op, double prescale, double postscale, py::object keep_alive,
                     bool with_waiter, const DeviceAndStream& device) {
  Request request = MakeRequest(kKind, std::move(name), ToShape(shape), dtype);
  SetReduction(request, op, Scales{prescale, postscale});
  return Submit(engine, std::move(request), source, target, std::move(keep_alive), with_waiter,
                device);
}

template <OperationKind kKind>
std::vector<HandlePointer> ReduceGroup(const EnginePointer& engine, const std::string& group,
                                       std::vector<Tensor> tensors, std::string_view op,
                                       double prescale, double postscale, bool with_waiter,
                                       const DeviceAndStream& device) {
  return SubmitGroup(
      engine, kKind, group, std::move(tensors), with_waiter, device,
      [&](Request& request) { SetReduction(request, op, Scales{prescale, postscale}); });
}

HandlePointer Allgather(const EnginePointer& engine, std::string name, uintptr_t source,
                        Shape shape, std::string_view dtype, py::object keep_alive,
                        bool with_waiter, const DeviceAndStream& device) {
  return Submit(engine,
                MakeRequest(OperationKind::kAllgather, std::move(name), std::move(shape), dtype),
                source, 0, std::move(keep_alive), with_waiter, device);
}

std::vector<HandlePointer> AllgatherGroup(const EnginePointer& engine, const std::string& group,
                                          std::vector<Tensor> tensors, bool with_waiter,
                                          const DeviceAndStream& device) {
  return SubmitGroup(engine, OperationKind::kAllgather, group, std::move(tensors), with_waiter,
                     device, [](Request&) {});
}

HandlePointer Alltoall(const EnginePointer& engine, std::string name, uintptr_t source, Shape shape,
                       Shape splits, std::string_view dtype, py::object keep_alive,
                       bool with_waiter, const DeviceAndStream& device) {
  Request request = MakeRequest(OperationKind::kAlltoall, std::move(name), std::move(shape), dtype);
  request.splits = std::move(splits);
  return Submit(engine, std::move(request), source, 0, std::move(keep_alive), with_waiter, device);
}

HandlePointer Broadcast(const EnginePointer& engine, std::string name, uintptr_t source,
                        uintptr_t target, Shape shape, std::string_view dtype, int root,
                        py::object keep_alive, bool with_waiter, const DeviceAndStream& device) {
  Request request =
      MakeRequest(OperationKind::kBroadcast, std::move(name), std::move(shape), dtype);
  request.root = root;
  return Submit(engine, std::move(request), source, target, std::move(keep_alive), with_waiter,
                device);
}

HandlePointer SubmitWithoutData(const EnginePointer& engine, OperationKind kind, std::string name,
                                bool with_waiter, const DeviceAndStream& device = {}) {
  return Submit(engine, MakeRequest(kind, std::move(name), {0}, Name(DType::kUInt8)), 0, 0,
                py::none(), with_waiter, device);
}

}  // namespace

void RegisterSubmissions(EngineClass& engine) {
  using py::arg;
  engine
      .def("allreduce", &Reduce<OperationKind::kAllreduce>, arg("name"), arg("source"),
           arg("target"), arg("shape"), arg("dtype"), arg("op") = "sum", arg("prescale") = 1.0,
           arg("postscale") = 1.0, arg("keep_alive") = py::none(), arg("with_waiter") = false,
           arg("device") = py::none())
      .def("reducescatter", &Reduce<OperationKind::kReducescatter>, arg("name"), arg("source"),
           arg("target"), arg("shape"), arg("dtype"), arg("op") = "sum", arg("prescale") = 1.0,
           arg("postscale") = 1.0, arg("keep_alive") = py::none(), arg("with_waiter") = false,
           arg("device") = py::none())
      .def("allgather", &Allgather, arg("name"), arg("source"), arg("shape"), arg("dtype"),
           arg("keep_alive") = py::none(), arg("with_waiter") = false, arg("device") = py::none())
      .def("alltoall", &Alltoall, arg("name"), arg("source"), arg("shape"), arg("splits"),
           arg("dtype"), arg("keep_alive") = py::none(), arg("with_waiter") = false,
           arg("device") = py::none())
      .def("broadcast", &Broadcast, arg("name"), arg("source"), arg("target"), arg("shape"),
           arg("dtype"), arg("root"), arg("keep_alive") = py::none(), arg("with_waiter") = false,
           arg("device") = py::none())
      .def("grouped_allreduce", &ReduceGroup<OperationKind::kAllreduce>, arg("group"),
           arg("tensors"), arg("op") = "sum", arg("prescale") = 1.0, arg("postscale") = 1.0,
           arg("with_waiter") = false, arg("device") = py::none())
      .def("grouped_reducescatter", &ReduceGroup<OperationKind::kReducescatter>, arg("group"),
           arg("tensors"), arg("op") = "sum", arg("prescale") = 1.0, arg("postscale") = 1.0,
           arg("with_waiter") = false, arg("device") = py::none())
      .def("grouped_allgather", &AllgatherGroup, arg("group"), arg("tensors"),
           arg("with_waiter") = false, arg("device") = py::none())
      .def(
          "barrier",
          [](const EnginePointer& self, std::string name, bool with_waiter) {
            return SubmitWithoutData(self, OperationKind::kBarrier, std::move(name), with_waiter);
          },
          arg("name"), arg("with_waiter") = false)
      .def(
          "join",
          [](const EnginePointer& self, bool with_waiter, const DeviceAndStream& device) {
            return SubmitWithoutData(self, OperationKind::kJoin, kJoinName, with_waiter, device);
          },
          arg("with_waiter") = false, arg("device") = py::none());
}

}  // namespace sparkhvd::bindings
