// The Python objects Engine and Operation.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/interruptible.h"
#include "bindings/pending.h"
#include "scheduler/engine.h"

namespace sparkhvd::bindings {

namespace py = pybind11;

// Python may drop a handle while the engine's thread still uses the buffers. The engine's thread
// never touches a Python object, because it must never wait for the GIL, least of all while the
// interpreter shuts down. So the objects that a dropped handle kept alive stay here until the
// operation is settled. A later call, which holds the GIL, then releases them.
class Orphans {
 public:
  void Adopt(std::shared_ptr<Operation> operation, py::object keep_alive) {
    orphans_.push_back(Orphan{std::move(operation), std::move(keep_alive)});
  }
  void ReleaseDone() {
    if (orphans_.empty()) return;
    const auto done =
        std::stable_partition(orphans_.begin(), orphans_.end(),
                              [](const Orphan& orphan) { return !orphan.operation->settled(); });
    // Release the objects outside the list, because a finalizer may call this function again.
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
  PyEngine(std::unique_ptr<Engine> engine, const MainThread& main_thread)
      : engine_(std::move(engine)), main_thread_(main_thread) {}
  ~PyEngine() {
    if (guard_.InChild()) {
      static_cast<void>(engine_.release());  // its threads and links belong to the parent
      return;
    }
    const GilRelease release;
    engine_.reset();
  }

  bool forked() const { return guard_.InChild(); }
  Engine& engine() {
    if (forked()) throw CoreFailure(Status(StatusCode::kShutDown, kForked));
    return *engine_;
  }
  // Call this in the child after a fork.
  void CloseCopies() const {
    if (forked()) engine_->CloseCopies();
  }
  Orphans& orphans() { return orphans_; }
  PendingOperations& pending() { return pending_; }
  const MainThread& main_thread() const { return main_thread_; }

 private:
  Orphans
      orphans_;  // destroyed after the engine, which uses the buffers until its thread has ended
  std::unique_ptr<Engine> engine_;
  const ForkGuard guard_;
  const MainThread main_thread_;
  PendingOperations pending_;
};

// Runs `act` without the GIL, because a call to the CUDA driver may block.
template <typename Act>
auto WithoutGil(const Act& act) {
  const GilRelease release;
  return act();
}

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
    if (operation_->settled() || engine_->forked()) return;
    if (!operation_->done()) engine_->engine().StartNow();  // no thread will wait for it
    engine_->orphans().Adopt(operation_, std::move(keep_alive_));
  }

  // In a forked child, there is nothing to wait for.
  bool done() const { return operation_->done() || engine_->forked(); }

  // Returns the seconds that it waited.
  double Wait(double timeout_s) {
    if (operation_->done()) {
      ReleaseBuffersIfSettled();
      Check(operation_->outcome());
      return 0.0;
    }
    static_cast<void>(engine_->engine());  // fails in a forked child
    const auto start = Deadline::Clock::now();
    const Status status = WaitInSlices(
        timeout_s, [&](Deadline deadline) { return engine_->engine().Wait(*operation_, deadline); },
        [&] { return operation_->done(); });
    ReleaseBuffersIfSettled();
    // The operation may have finished since the last slice ended. Then its outcome counts.
    Check(operation_->done() ? operation_->outcome() : status);
    return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  }

  // Makes later work on `stream` wait for the result. Does nothing for host memory.
  void LetWait(uintptr_t stream) {
    if (operation_->device() == nullptr) return;
    RequireGoodDevice();
    Check(WithoutGil([&] { return operation_->device()->LetWait(ToStream(stream)); }));
  }

  // Returns whether the device has also completed the operation. True for host memory.
  bool CompletedOnDevice() const {
    RequireGoodDevice();
    return operation_->device() == nullptr ||
           WithoutGil([&] { return operation_->device()->Finished(); });
  }

  // Copies the result of an operation on a device, in stream order.
  void MoveOutput(uintptr_t target, uintptr_t stream) {
    if (Finished().device() == nullptr) return;
    RequireGoodDevice();
    auto* memory = reinterpret_cast<std::byte*>(target);  // NOLINT: the caller's contract
    Check(WithoutGil([&] { return operation_->device()->MoveOutput(memory, ToStream(stream)); }));
  }

  // Fails unless this operation has its own output and has succeeded.
  const Operation& Finished() const {
    const Request& request = operation_->request();
    if (request.kind != OperationKind::kAllgather && request.kind != OperationKind::kAlltoall &&
        request.kind != OperationKind::kJoin) {
      Check(Status(StatusCode::kInvalidArgument, request.Title() + " has no output of its own"));
    }
    RequireDone();
    Check(operation_->outcome());
    return *operation_;
  }

 private:
  static CudaStream ToStream(uintptr_t stream) {
    return reinterpret_cast<CudaStream>(stream);  // NOLINT: the caller's contract
  }

  // Python's garbage collector does not see the reference from this object to the owner of the
  // buffers. If it lasted, an owner that refers to its handle would never be freed.
  void ReleaseBuffersIfSettled() {
    if (!operation_->settled()) return;
    const py::object released = std::move(keep_alive_);  // its finalizer may use this object
  }

  void RequireDone() const {
    if (operation_->done()) return;
    Check(Status(StatusCode::kInvalidArgument,
                 operation_->request().Title() + " is not finished; call wait() first"));
  }

  // An operation that is done on the host may have failed on the device.
  void RequireGoodDevice() const {
    RequireDone();
    Check(operation_->outcome());
    Check(engine_->engine().Failure().Annotate(operation_->request().Title()));
  }

  std::shared_ptr<PyEngine> engine_;
  std::shared_ptr<Operation> operation_;
  py::object keep_alive_;
};

}  // namespace sparkhvd::bindings
