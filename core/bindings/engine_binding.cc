#include "bindings/engine_binding.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/device_binding.h"
#include "bindings/direct_binding.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/py_engine.h"
#include "bindings/rendezvous_binding.h"
#include "bindings/submission_binding.h"
#include "scheduler/affinity.h"
#include "scheduler/autotune_log.h"
#include "scheduler/engine.h"
#include "transport/mesh.h"

namespace sparkhvd::bindings {
namespace {

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

// The Python object Autotune.
struct Autotune {
  std::string log;
  AutotuneOptions options;
};

Autotune MakeAutotune(const std::string& log, size_t warmup_samples, size_t steps_per_sample,
                      size_t max_samples) {
  Autotune autotune{log, {}};
  autotune.options.warmup_samples = warmup_samples;
  autotune.options.steps_per_sample = steps_per_sample;
  autotune.options.max_samples = max_samples;
  return autotune;
}

AutotuneOptions OptionsOf(const Autotune& autotune, int rank) {
  AutotuneOptions options = autotune.options;
  if (rank != 0 || autotune.log.empty()) return options;
  options.report = [log = Take(AutotuneLog::Open(autotune.log))](const TuningSample& sample) {
    log->Write(sample);
  };
  return options;
}

std::shared_ptr<PyEngine> MakeEngine(
    int rank, int size, const RendezvousClient* rendezvous, const std::string& token,
    const std::string& scope, const std::string& label, const std::string& host_key,
    std::vector<std::string> bind_hosts, bool shared_memory, bool encrypt,
    std::map<std::string, std::string> common_settings, std::chrono::milliseconds host_timeout,
    std::optional<std::chrono::milliseconds> answer_timeout, double link_gbits,
    double link_latency_us, std::optional<size_t> fusion_threshold, size_t cache_capacity,
    double collective_timeout_s, double timeout_s, std::optional<bool> hierarchical_allreduce,
    bool hierarchical_allgather, std::optional<int> processor_core, const Autotune* autotune,
    const DeviceLibraries* device_libraries, bool shares_device, PyEngine* parent,
    const std::vector<int>& parent_ranks, const std::string& timeline_label) {
  if (processor_core) Check(CheckProcessorCore(*processor_core));
  if (size < 1 || rank < 0 || rank >= size) {
    Check(Status(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                                   " is out of range for a job of size " +
                                                   std::to_string(size)));
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
  arguments.mesh.bind_hosts = std::move(bind_hosts);
  arguments.mesh.interrupted = CheckSignals;
  arguments.mesh.shared_memory = shared_memory;
  arguments.mesh.encrypt = encrypt;
  arguments.mesh.common_settings = std::move(common_settings);
  arguments.mesh.host_timeout = host_timeout;
  arguments.mesh.answer_limit = answer_timeout;
  arguments.mesh.link_costs = LinkCosts{link_latency_us * 1e-6, 8e-9 / link_gbits};
  arguments.engine.label = label;
  arguments.engine.cache_capacity = cache_capacity;
  arguments.engine.collective_timeout_s = collective_timeout_s;
  arguments.engine.hierarchical_allgather = hierarchical_allgather;
  arguments.engine.processor_core = processor_core;
  arguments.engine.fusion_threshold = fusion_threshold;
  arguments.engine.hierarchical_allreduce = hierarchical_allreduce;
  if (parent != nullptr) {
    if (parent_ranks.size() != static_cast<size_t>(size)) {
      Check(Status(StatusCode::kInvalidArgument,
                   "parent_ranks must name the parent's number of "
                   "each rank"));
    }
    arguments.engine.timeline = parent->engine().timeline();
    if (size > 1) arguments.mesh.neighbors = Take(parent->engine().Neighbors(parent_ranks));
  }
  arguments.engine.timeline_label = timeline_label;
  if (device_libraries != nullptr) {
    arguments.engine.device_libraries = std::make_shared<DeviceLibraries>(*device_libraries);
    arguments.engine.shares_device = shares_device;
  }
  if (autotune != nullptr) arguments.engine.autotune = OptionsOf(*autotune, rank);
  arguments.timeout_s = timeout_s;
  if (rendezvous != nullptr) arguments.rendezvous = rendezvous->client;
  Result<Mesh> connected = [&arguments] {
    const GilRelease release;
    return Connect(arguments);
  }();
  ThrowIfInterrupted();
  Mesh mesh = Take(std::move(connected));
  const MainThread main_thread;
  const GilRelease release;
  return std::make_shared<PyEngine>(
      std::make_unique<Engine>(arguments.engine, std::move(mesh),
                               FailureBoard{arguments.rendezvous, scope}),
      main_thread);
}

py::dict CountersOf(PyEngine& self) {
  const Counters& counters = self.engine().counters();
  py::dict result;
  result["operations"] = counters.operations.load();
  result["bytes"] = counters.bytes.load();
  result["cycles"] = counters.cycles.load();
  result["cache_hits"] = counters.cache_hits.load();
  result["fused_buffers"] = counters.fused_buffers.load();
  result["hierarchical"] = counters.hierarchical.load();
  result["on_device"] = counters.on_device.load();
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

py::dict TuningOf(PyEngine& self) {
  const Retuning tuning = self.engine().tuning();
  py::dict result;
  result["fusion_threshold"] = tuning.tunables.fusion_threshold;
  result["small_allreduce"] = tuning.tunables.arena.small_bytes;
  result["allreduce_chunk"] = tuning.tunables.arena.chunk_bytes;
  result["hierarchical_allreduce"] = static_cast<int>(tuning.tunables.hierarchical);
  result["searching"] = static_cast<int>(!tuning.last);
  return result;
}

void StartTimeline(PyEngine& self, const std::string& path, const std::string& recording,
                   bool mark_cycles) {
  TimelineOptions options;
  options.path = path;
  options.recording = recording;
  options.rank = self.engine().rank();
  options.mark_cycles = mark_cycles;
  Check(self.engine().timeline()->Start(options));
}

void Shutdown(PyEngine& self, double timeout_s) {
  {
    const GilRelease release;
    Check(self.engine().Shutdown(Deadline::AfterSeconds(timeout_s)));
  }
  self.orphans().ReleaseDone();
}

void RegisterOperation(py::module_& module) {
  py::class_<Handle>(module, "Operation", py::buffer_protocol())
      .def_buffer([](Handle& self) {
        // A buffer of length 0 also needs an address.
        static std::byte nothing{};
        const Bytes output = self.Finished().output();
        std::byte* data = output.empty() ? &nothing : output.data();
        return py::buffer_info(reinterpret_cast<uint8_t*>(data),
                               static_cast<py::ssize_t>(output.size()));
      })
      .def("done", &Handle::done)
      .def("wait", &Handle::Wait, py::arg("timeout_s"))
      .def("output",
           [](py::object self) {
             static_cast<void>(self.cast<Handle&>().Finished());
             return py::memoryview(self);
           })
      .def("rows", [](const Handle& self) { return self.Finished().rows(); })
      .def("let_wait", &Handle::LetWait, py::arg("stream"))
      .def("completed_on_device", &Handle::CompletedOnDevice)
      .def("move_output", &Handle::MoveOutput, py::arg("target"), py::arg("stream"));
}

}  // namespace

void RegisterEngine(py::module_& module) {
  using py::arg;
  RegisterOperation(module);
  py::class_<Autotune>(module, "Autotune")
      .def(py::init(&MakeAutotune), arg("log"), arg("warmup_samples"), arg("steps_per_sample"),
           arg("max_samples"));
  RegisterDevices(module);
  module.attr("SHARE_DEVICE_NAME") = kShareDeviceName;
  module.attr("SILENT_LINK_SECONDS") = static_cast<double>(kSilentLink.count());
  EngineClass engine(module, "Engine");
  RegisterSubmissions(engine);
  RegisterDirectCalls(engine);
  engine
      .def(py::init(&MakeEngine), arg("rank"), arg("size"), py::kw_only(),
           arg("rendezvous") = py::none(), arg("token") = py::bytes(), arg("scope") = "",
           arg("label") = "", arg("host_key") = "",
           arg("bind_hosts") = std::vector<std::string>{"127.0.0.1"}, arg("shared_memory") = true,
           arg("encrypt") = false, arg("common_settings") = std::map<std::string, std::string>(),
           arg("host_timeout") = std::chrono::milliseconds(kSilentLink),
           arg("answer_timeout") = py::none(), arg("link_gbits") = 25.0,
           arg("link_latency_us") = 30.0, arg("fusion_threshold") = py::none(),
           arg("cache_capacity") = 1024, arg("collective_timeout_s") = 1800.0,
           arg("timeout_s") = 60.0, arg("hierarchical_allreduce") = py::none(),
           arg("hierarchical_allgather") = true, arg("processor_core") = py::none(),
           arg("autotune") = py::none(), arg("device_libraries") = py::none(),
           arg("shares_device") = false, arg("parent") = py::none(),
           arg("parent_ranks") = std::vector<int>(), arg("timeline_label") = "")
      .def_property_readonly("rank", [](PyEngine& self) { return self.engine().rank(); })
      .def_property_readonly("size", [](PyEngine& self) { return self.engine().size(); })
      .def("close_copies", &PyEngine::CloseCopies)
      .def("counters", &CountersOf)
      .def("tuning", &TuningOf)
      .def("pending", [](PyEngine& self) { return self.pending().List(); })
      .def("start_timeline", &StartTimeline, arg("path"), arg("recording"), arg("mark_cycles"),
           py::call_guard<GilRelease>())
      .def(
          "stop_timeline", [](PyEngine& self) { Check(self.engine().timeline()->Stop()); },
          py::call_guard<GilRelease>())
      .def("host_ranks", [](PyEngine& self) { return self.engine().host_ranks(); })
      .def("local_ranks", [](PyEngine& self) { return self.engine().local_ranks(); })
      .def(
          "abort", [](PyEngine& self, const std::string& why) { self.engine().Abort(why); },
          arg("why"), py::call_guard<GilRelease>())
      .def("shutdown", &Shutdown, arg("timeout_s"));
}

}  // namespace sparkhvd::bindings
