// The parts of a one-rank engine, with a negotiation whose outcomes the test chooses.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/cycle.h"
#include "scheduler/rank.h"

namespace sparkhvd {

// Ends each cycle with the result of `conclude`, and counts the cycles that were entered.
class ScriptedNegotiation final : public Negotiation {
 public:
  ScriptedNegotiation() : Negotiation(1, 16) {}

  Bytes Announce(const RequestMessage& message) override {
    announced = message;
    return Bytes();
  }
  Status Enter() override {
    ++entered;
    return enter;
  }
  Result<Outcome> Conclude(Deadline deadline) override { return conclude(deadline); }
  bool interruptible() const override { return true; }

  RequestMessage announced;
  int entered = 0;
  Status enter;
  std::function<Result<Outcome>(Deadline)> conclude;
};

// Returns the outcome if all ranks have requested everything that this rank announced.
inline Result<Outcome> AgreeOn(const RequestMessage& message) {
  Outcome outcome;
  outcome.response.cached = message.cached;
  for (const Request& request : message.requests) {
    outcome.response.agreements.push_back(Agreement{request.name, {}, {}, {}, {}});
  }
  return outcome;
}

struct ScriptedCycle {
  explicit ScriptedCycle(double collective_timeout_s = 30)
      : timeout_s(collective_timeout_s),
        mesh(std::move(InProcessMeshes({0}, false)[0])),
        execution(mesh, nullptr, Tunables(), true, timeline, counters),
        lifecycle(FailureBoard{}, 0, queue, {[this](const Status&) { ++aborts; }, [] {}}) {}

  // The caller keeps the tensor alive.
  Pointer Submit(const std::string& name, Start start = Start::kWithWaiter) {
    Request request;
    request.name = name;
    request.shape = {static_cast<int64_t>(tensor.size())};
    auto* bytes = reinterpret_cast<std::byte*>(tensor.data());
    const auto operation = std::make_shared<Operation>(std::move(request), bytes, bytes);
    EXPECT_TRUE(queue.Push(Span<const Pointer>(&operation, 1), start).ok());
    return operation;
  }

  // Makes the other ranks submit everything, submit nothing, or arrive too late.
  void OthersAgree() {
    negotiation.conclude = [this](Deadline) { return AgreeOn(negotiation.announced); };
  }
  void OthersHaveNotSubmitted() {
    negotiation.conclude = [](Deadline) -> Result<Outcome> { return Outcome(); };
  }
  void OthersAreLate() {
    negotiation.conclude = [](Deadline) -> Result<Outcome> {
      return Status(StatusCode::kTimeout, "rank 7 is missing");
    };
  }

  const double timeout_s;
  std::vector<float> tensor = {1.0f, 2.0f};
  Mesh mesh;
  Counters counters;
  EngineTimeline timeline{nullptr, ""};
  Execution execution;
  DeviceExecution devices{nullptr, 0, 1, "", false};
  ScriptedNegotiation negotiation;
  SubmissionQueue queue{true, timeline};
  std::atomic<int> aborts{0};
  Lifecycle lifecycle;
  Dispatcher dispatcher{
      {queue, lifecycle, execution, devices, timeline, counters}, 0, 1, "", timeout_s};
  Cycle cycle{{queue, negotiation, execution, dispatcher, timeline, counters},
              nullptr,
              Retuning{Tunables(), true},
              timeout_s};
};

}  // namespace sparkhvd
