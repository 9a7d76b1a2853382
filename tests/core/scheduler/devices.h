// Ranks for engine tests whose tensors are in the memory of simulated devices.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/rank.h"
#include "simulated_device/libraries.h"

namespace sparkhvd {

inline EngineConfig WithDevices(double timeout_s = 30) {
  EngineConfig config = Quick(timeout_s);
  config.device_libraries = std::make_shared<DeviceLibraries>(SimulatedLibraries());
  return config;
}

inline Request RequestFor(OperationKind kind, const std::string& name, std::vector<int64_t> shape) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.shape = std::move(shape);
  return request;
}

// The program of one rank. Its device has the rank's number.
class Program {
 public:
  Program(int rank, Engine& engine) : stream_(rank), engine_(engine) {}

  DeviceStream device() const { return DeviceStream{stream_.ordinal(), stream_.handle()}; }

  Result<Pointer> TrySubmit(Request request, const void* source, void* target) {
    return engine_.Submit(std::move(request), static_cast<const std::byte*>(source),
                          static_cast<std::byte*>(target), Start::kNow, device());
  }
  Result<Pointer> TryAllreduce(const std::string& name, std::vector<float>& data,
                               ReduceOp op = ReduceOp::kSum) {
    Request request =
        RequestFor(OperationKind::kAllreduce, name, {static_cast<int64_t>(data.size())});
    request.op = op;
    return TrySubmit(std::move(request), data.data(), data.data());
  }

  // Returns the outcome on the host. If it is OK, the program's stream waits for the result.
  Status Finish(const Result<Pointer>& operation) {
    SHVD_TRY(FailureOf(operation));
    SHVD_TRY(operation.value()->device()->LetWait(stream_.handle()));
    stream_.Await();
    return Status();
  }

  // Returns the output of an allgather or alltoall, which has `rows` elements.
  template <typename T>
  std::vector<T> Output(Operation& operation) {
    int64_t rows = 0;
    for (const int64_t of_rank : operation.rows()) rows += of_rank;
    std::vector<T> values(static_cast<size_t>(rows));
    auto* target = reinterpret_cast<std::byte*>(values.data());
    EXPECT_TRUE(operation.device()->MoveOutput(target, stream_.handle()).ok());
    stream_.Await();
    return values;
  }

  const ProgramStream& stream() const { return stream_; }

 private:
  ProgramStream stream_;
  Engine& engine_;
};

// Expects that devices hold nothing any more, and that no real device would have been misused.
inline void ExpectCleanDevices() {
  EXPECT_EQ(simulated::Allocations(), 0u);
  EXPECT_EQ(simulated::Events(), 0u);
  EXPECT_EQ(simulated::TakeMisuses(), std::vector<std::string>());
}

// Runs `body` once per rank like OnEveryRank, and expects clean devices afterwards.
inline void OnEveryDevice(const std::vector<int>& hosts, const EngineConfig& config,
                          const std::function<void(int, Rank&, Program&)>& body) {
  OnEveryRank(InProcessMeshes(hosts), config, [&](int rank, Rank& self) {
    {
      Program program(rank, self.engine);
      body(rank, self, program);
    }
    // Shuts down on the ranks' threads and not one rank after the other, because ranks wait for
    // each other.
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
  });
  ExpectCleanDevices();
}

}  // namespace sparkhvd
