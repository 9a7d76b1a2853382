#include "bindings/engine_binding.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/interruptible.h"
#include "bindings/pending.h"
#include "bindings/rendezvous_binding.h"
#include "scheduler/engine.h"
#include "transport/mesh.h"

namespace py = pybind11;

namespace sparkhvd::bindings {
namespace {

using Shape = std::vector<int64_t>;

// Python drops a handle whenever it likes, while the engine thread still uses the buffers. That
// thread never touches a Python object (it must not need the GIL, least of all while the
// interpreter is being torn down): what the dropped handle kept alive stays here until the
// operation is done, and is released by the next call that holds the GIL anyway.
class Orphans {
 public:
  void Adopt(std::shared_ptr<Operation> operation, py::object keep_alive) {
    orphans_.push_back(Orphan{std::move(operation), std::move(keep_alive)});
  }
  void ReleaseDone() {
    const auto done =
        std::stable_partition(orphans_.begin(), orphans_.end(),
                              [](const Orphan& orphan) { return !orphan.operation->done(); });
    // Released outside the list: a finalizer may come back here.
    std::vector<Orphan> finished(std::make_move_iterator(done),
                                 std::make_move_iterator(orphans_.end()));
    orphans_.erase(done, orphans_.end());
  }

 private:
  struct Orphan {
    std::shared_ptr<Operation> operation;
    py::object keep_alive;
  };
  std::vector<Orphan> orphans_;  // guarded by the GIL
};

// The Python object Engine.
class PyEngine {
 public:
  PyEngine(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}  // NOLINT: for py::init
  ~PyEngine() {
    const py::gil_scoped_release release;
    engine_.reset();
  }

  Engine& engine() { return *engine_; }
  Orphans& orphans() { return orphans_; }
  PendingOperations& pending() { return pending_; }

 private:
  Orphans
      orphans_;  // destroyed after the engine, which uses the buffers until its thread has ended
  std::unique_ptr<Engine> engine_;
  PendingOperations pending_;
};

// The Python object Operation.
class Handle {
 public:
  Handle(std::shared_ptr<PyEngine> engine, std::shared_ptr<Operation> operation,
         py::object keep_alive)
      : engine_(std::move(engine)),
        operation_(std::move(operation)),
        keep_alive_(std::move(keep_alive)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (operation_->done()) return;
    engine_->engine().StartNow();  // nobody is going to wait
    engine_->orphans().Adopt(operation_, std::move(keep_alive_));
  }

  bool done() const { return operation_->done(); }

  void Wait(double timeout_s) {
    const Status status = WaitInSlices(
        timeout_s, [&](Deadline deadline) { return engine_->engine().Wait(*operation_, deadline); },
        [&] { return operation_->done(); });
    // It may have finished since the last slice ended; then that is the outcome.
    Check(operation_->done() ? operation_->Wait(Deadline::AfterSeconds(0)) : status);
  }

  // Fails unless this is an allgather that has succeeded.
  const Operation& Gathered() const {
    const Request& request = operation_->request();
    if (request.kind != OperationKind::kAllgather) {
      Check(Status(StatusCode::kInvalidArgument, request.Title() + " has no output of its own"));
    }
    if (!operation_->done()) {
      Check(Status(StatusCode::kInvalidArgument, request.Title() + " is not finished: wait first"));
    }
    Check(operation_->Wait(Deadline::AfterSeconds(0)));
    return *operation_;
  }

 private:
  std::shared_ptr<PyEngine> engine_;
  std::shared_ptr<Operation> operation_;
  py::object keep_alive_;
};

struct ConnectArguments {
  MeshOptions mesh;
  EngineConfig engine;
  std::shared_ptr<KeyValueStore> rendezvous;
  double timeout_s = 0;
};

Result<Mesh> Connect(const ConnectArguments& arguments) {
  if (arguments.mesh.size == 1) return std::move(InProcessMeshes({0}, false)[0]);
  return ConnectMesh(arguments.mesh, *arguments.rendezvous,
                     Deadline::AfterSeconds(arguments.timeout_s));
}

std::shared_ptr<PyEngine> MakeEngine(int rank, int size, const RendezvousClient* rendezvous,
                                     const std::string& token, const std::string& scope,
                                     const std::string& host_key, const std::string& bind_host,
                                     bool shared_memory, size_t fusion_threshold,
                                     size_t cache_capacity, double collective_timeout_s,
                                     double timeout_s) {
  if (size < 1 || rank < 0 || rank >= size) {
    Check(Status(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) + " is not one of " +
                                                   std::to_string(size) + " ranks"));
  }
  if (size > 1 && rendezvous == nullptr) {
    Check(Status(StatusCode::kInvalidArgument,
                 "a job of " + std::to_string(size) + " ranks needs a rendezvous"));
  }
  ConnectArguments arguments;
  arguments.mesh.rank = rank;
  arguments.mesh.size = size;
  arguments.mesh.token = token;
  arguments.mesh.scope = scope;
  arguments.mesh.host_key = host_key;
  arguments.mesh.bind_host = bind_host;
  arguments.mesh.shared_memory = shared_memory;
  arguments.engine.fusion_threshold = fusion_threshold;
  arguments.engine.cache_capacity = cache_capacity;
  arguments.engine.collective_timeout_s = collective_timeout_s;
  arguments.timeout_s = timeout_s;
  if (rendezvous != nullptr) arguments.rendezvous = rendezvous->client;
  const py::gil_scoped_release release;
  Mesh mesh = Take(Connect(arguments));
  return std::make_shared<PyEngine>(std::make_unique<Engine>(
      arguments.engine, std::move(mesh), FailureBoard{arguments.rendezvous, scope}));
}

DType ToDType(const std::string& name) {
  if (const std::optional<DType> dtype = ParseDType(name)) return *dtype;
  throw CoreFailure(Status(StatusCode::kInvalidArgument,
                           "dtype '" + name +
                               "' is not one of bool, uint8, int8, int16, int32, int64, float16, "
                               "bfloat16, float32, float64"));
}

ReduceOp ToReduceOp(const std::string& name) {
  if (const std::optional<ReduceOp> op = ParseReduceOp(name)) return *op;
  throw CoreFailure(Status(StatusCode::kInvalidArgument,
                           "op '" + name + "' is not one of sum, average, min, max, product"));
}

// Addresses are what Python has: tensor.data_ptr(), array.ctypes.data.
std::byte* ToPointer(uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT: the caller's contract
}

std::unique_ptr<Handle> Submit(const std::shared_ptr<PyEngine>& engine, Request request,
                               uintptr_t source, uintptr_t target, py::object keep_alive,
                               bool with_waiter = false) {
  engine->orphans().ReleaseDone();
  Result<std::shared_ptr<Operation>> operation = [&] {
    const py::gil_scoped_release release;
    return engine->engine().Submit(std::move(request), ToPointer(source), ToPointer(target),
                                   with_waiter ? Start::kWithWaiter : Start::kNow);
  }();
  if (operation.ok()) engine->pending().Add(operation.value());
  return std::make_unique<Handle>(engine, Take(std::move(operation)), std::move(keep_alive));
}

std::unique_ptr<Handle> Allreduce(const std::shared_ptr<PyEngine>& engine, std::string name,
                                  uintptr_t source, uintptr_t target, Shape shape,
                                  const std::string& dtype, const std::string& op, double prescale,
                                  double postscale, py::object keep_alive, bool with_waiter) {
  Request request;
  request.name = std::move(name);
  request.kind = OperationKind::kAllreduce;
  request.dtype = ToDType(dtype);
  request.op = ToReduceOp(op);
  request.prescale = prescale;
  request.postscale = postscale;
  request.shape = std::move(shape);
  return Submit(engine, std::move(request), source, target, std::move(keep_alive), with_waiter);
}

std::unique_ptr<Handle> Allgather(const std::shared_ptr<PyEngine>& engine, std::string name,
                                  uintptr_t source, Shape shape, const std::string& dtype,
                                  py::object keep_alive) {
  Request request;
  request.name = std::move(name);
  request.kind = OperationKind::kAllgather;
  request.dtype = ToDType(dtype);
  request.shape = std::move(shape);
  return Submit(engine, std::move(request), source, 0, std::move(keep_alive));
}

std::unique_ptr<Handle> Broadcast(const std::shared_ptr<PyEngine>& engine, std::string name,
                                  uintptr_t source, uintptr_t target, Shape shape,
                                  const std::string& dtype, int root, py::object keep_alive) {
  Request request;
  request.name = std::move(name);
  request.kind = OperationKind::kBroadcast;
  request.dtype = ToDType(dtype);
  request.root = root;
  request.shape = std::move(shape);
  return Submit(engine, std::move(request), source, target, std::move(keep_alive));
}

std::unique_ptr<Handle> Barrier(const std::shared_ptr<PyEngine>& engine, std::string name) {
  Request request;
  request.name = std::move(name);
  request.kind = OperationKind::kBarrier;
  request.dtype = DType::kUInt8;
  request.shape = {0};
  return Submit(engine, std::move(request), 0, 0, py::none());
}

py::dict CountersOf(PyEngine& self) {
  const Counters& counters = self.engine().counters();
  py::dict result;
  result["operations"] = counters.operations.load();
  result["bytes"] = counters.bytes.load();
  result["cycles"] = counters.cycles.load();
  result["cache_hits"] = counters.cache_hits.load();
  result["fused_buffers"] = counters.fused_buffers.load();
  result["queue_us"] = counters.queue_us.load();
  result["negotiation_us"] = counters.negotiation_us.load();
  result["collective_us"] = counters.collective_us.load();
  result["fusion_copy_us"] = counters.fusion_copy_us.load();
  for (size_t kind = 0; kind < counters.by_kind.size(); ++kind) {
    const KindCounters& of_kind = counters.by_kind[kind];
    if (of_kind.operations.load() == 0) continue;
    const std::string name = Name(static_cast<OperationKind>(kind));
    result[py::str(name + ".operations")] = of_kind.operations.load();
    result[py::str(name + ".bytes")] = of_kind.bytes.load();
  }
  return result;
}

void StartTimeline(PyEngine& self, const std::string& path, const std::string& recording,
                   bool mark_cycles) {
  TimelineOptions options;
  options.path = path;
  options.recording = recording;
  options.rank = self.engine().rank();
  options.mark_cycles = mark_cycles;
  Check(self.engine().timeline().Start(options));
}

void Shutdown(PyEngine& self, double timeout_s) {
  {
    const py::gil_scoped_release release;
    Check(self.engine().Shutdown(Deadline::AfterSeconds(timeout_s)));
  }
  self.orphans().ReleaseDone();
}

void RegisterOperation(py::module_& module) {
  py::class_<Handle>(module, "Operation", py::buffer_protocol())
      .def_buffer([](Handle& self) {
        // A buffer of length 0 needs an address nevertheless.
        static std::byte nothing{};
        const Bytes output = self.Gathered().output();
        std::byte* data = output.empty() ? &nothing : output.data();
        return py::buffer_info(reinterpret_cast<uint8_t*>(data),
                               static_cast<py::ssize_t>(output.size()));
      })
      .def("done", &Handle::done)
      .def("wait", &Handle::Wait, py::arg("timeout_s"))
      .def("output",
           [](py::object self) {
             static_cast<void>(self.cast<Handle&>().Gathered());
             return py::memoryview(self);
           })
      .def("first_dims", [](const Handle& self) { return self.Gathered().first_dims(); });
}

}  // namespace

void RegisterEngine(py::module_& module) {
  using py::arg;
  RegisterOperation(module);
  py::class_<PyEngine, std::shared_ptr<PyEngine>>(module, "Engine")
      .def(py::init(&MakeEngine), arg("rank"), arg("size"), py::kw_only(),
           arg("rendezvous") = py::none(), arg("token") = py::bytes(), arg("scope") = "",
           arg("host_key") = "", arg("bind_host") = "127.0.0.1", arg("shared_memory") = true,
           arg("fusion_threshold") = size_t{64} << 20, arg("cache_capacity") = 1024,
           arg("collective_timeout_s") = 1800.0, arg("timeout_s") = 60.0)
      .def_property_readonly("rank", [](PyEngine& self) { return self.engine().rank(); })
      .def_property_readonly("size", [](PyEngine& self) { return self.engine().size(); })
      .def("allreduce", &Allreduce, arg("name"), arg("source"), arg("target"), arg("shape"),
           arg("dtype"), arg("op") = "sum", arg("prescale") = 1.0, arg("postscale") = 1.0,
           arg("keep_alive") = py::none(), arg("with_waiter") = false)
      .def("allgather", &Allgather, arg("name"), arg("source"), arg("shape"), arg("dtype"),
           arg("keep_alive") = py::none())
      .def("broadcast", &Broadcast, arg("name"), arg("source"), arg("target"), arg("shape"),
           arg("dtype"), arg("root"), arg("keep_alive") = py::none())
      .def("barrier", &Barrier, arg("name"))
      .def("counters", &CountersOf)
      .def("pending", [](PyEngine& self) { return self.pending().List(); })
      .def("start_timeline", &StartTimeline, arg("path"), arg("recording"), arg("mark_cycles"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "stop_timeline", [](PyEngine& self) { Check(self.engine().timeline().Stop()); },
          py::call_guard<py::gil_scoped_release>())
      .def("host_ranks", [](PyEngine& self) { return self.engine().host_ranks(); })
      .def("local_ranks", [](PyEngine& self) { return self.engine().local_ranks(); })
      .def(
          "abort", [](PyEngine& self, const std::string& why) { self.engine().Abort(why); },
          arg("why"), py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &Shutdown, arg("timeout_s"));
}

}  // namespace sparkhvd::bindings
