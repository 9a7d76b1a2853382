// Ranks for engine tests: threads that each have an engine.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rendezvous/in_process_store.h"
#include "scheduler/engine.h"

namespace sparkhvd {

using Pointer = std::shared_ptr<Operation>;

inline Deadline Patience() { return Deadline::AfterSeconds(30); }

inline std::byte* BytesOf(std::vector<float>& data) {
  return reinterpret_cast<std::byte*>(data.data());
}

// Synchronizes the threads of a test without the engine.
class Gate {
 public:
  explicit Gate(int count) : missing_(count) {}
  void Meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) changed_.notify_all();
    EXPECT_TRUE(changed_.wait_until(lock, Patience().at(), [this] { return missing_ == 0; }));
  }

 private:
  std::mutex mutex_;  // guards missing_
  std::condition_variable changed_;
  int missing_;
};

// One rank's engine and the calls that tests need.
class Rank {
 public:
  Rank(const EngineConfig& config, Mesh mesh, std::shared_ptr<KeyValueStore> store)
      : engine(config, std::move(mesh), FailureBoard{std::move(store), "test"}) {}

  Result<Pointer> TryAllreduce(const std::string& name, std::vector<float>& data,
                               ReduceOp op = ReduceOp::kSum, double prescale = 1.0) {
    Request request;
    request.name = name;
    request.op = op;
    request.prescale = prescale;
    request.shape = {static_cast<int64_t>(data.size())};
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    return engine.Submit(std::move(request), bytes, bytes);
  }
  // Runs on the caller's thread if the engine allows it.
  Pointer AllreduceWithWaiter(const std::string& name, std::vector<float>& data) {
    Request request;
    request.name = name;
    request.shape = {static_cast<int64_t>(data.size())};
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    Result<Pointer> operation = engine.Submit(std::move(request), bytes, bytes, Start::kWithWaiter);
    EXPECT_TRUE(operation.ok()) << operation.status().message();
    return std::move(operation).value();
  }
  Pointer Allreduce(const std::string& name, std::vector<float>& data, double prescale = 1.0) {
    Result<Pointer> operation = TryAllreduce(name, data, ReduceOp::kSum, prescale);
    EXPECT_TRUE(operation.ok()) << operation.status().message();
    return std::move(operation).value();
  }
  Result<Pointer> TryBarrier(const std::string& name) {
    Request request;
    request.name = name;
    request.kind = OperationKind::kBarrier;
    request.shape = {0};
    return engine.Submit(std::move(request), nullptr, nullptr);
  }
  Status BarrierAndWait(const std::string& name) {
    Result<Pointer> operation = TryBarrier(name);
    SHVD_TRY(operation.status());
    return operation.value()->Wait(Patience());
  }

  Engine engine;
};

inline EngineConfig Quick(double timeout_s = 30) {
  EngineConfig config;
  config.collective_timeout_s = timeout_s;
  return config;
}

inline std::vector<int> OneHost(int size) { return std::vector<int>(static_cast<size_t>(size), 0); }

// Runs `body` once per mesh, each on a thread with an engine. The ranks leave when all bodies have
// ended.
inline void OnEveryRank(std::vector<Mesh> meshes, const EngineConfig& config,
                        const std::function<void(int, Rank&)>& body) {
  auto store = std::make_shared<InProcessStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Mesh& mesh : meshes) ranks.push_back(std::make_unique<Rank>(config, std::move(mesh), store));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] { body(static_cast<int>(rank), *ranks[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Waits for `operation` to fail and returns the status.
inline Status FailureOf(const Result<Pointer>& operation) {
  return operation.ok() ? operation.value()->Wait(Patience()) : operation.status();
}

inline void ExpectFailure(const Status& status, StatusCode code,
                          const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " in " << status.message();
  }
}

}  // namespace sparkhvd
