// The engine's operations in the memory of devices.
#include <gtest/gtest.h>

#include <numeric>

#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"
#include "scheduler/devices.h"

namespace sparkhvd {
namespace {

class EngineDevices : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
  void Run(const std::function<void(int, Rank&, Program&)>& body) const {
    OnEveryDevice(GetParam(), WithDevices(), body);
  }
};

TEST_P(EngineDevices, ReduceWithEveryOperator) {
  Run([this](int rank, Rank& self, Program& program) {
    const std::vector<std::pair<ReduceOp, float>> expected = {
        {ReduceOp::kSum, static_cast<float>(size() * (size() + 1) / 2)},
        {ReduceOp::kAverage, static_cast<float>(size() + 1) / 2},
        {ReduceOp::kMin, 1.0f},
        {ReduceOp::kMax, static_cast<float>(size())}};
    for (int round = 0; round < 3; ++round) {
      for (const auto& [op, result] : expected) {
        std::vector<float> data(17, static_cast<float>(rank + 1));
        const Status status = program.Finish(program.TryAllreduce(Name(op), data, op));
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(data, std::vector<float>(17, result)) << Name(op);
      }
      std::vector<float> data(17, 2.0f);
      EXPECT_TRUE(program.Finish(program.TryAllreduce("product", data, ReduceOp::kProduct)).ok());
      EXPECT_EQ(data[16], static_cast<float>(1 << size()));
      std::vector<float> nothing;
      EXPECT_TRUE(program.Finish(program.TryAllreduce("nothing", nothing)).ok());
    }
    EXPECT_EQ(self.engine.counters().on_device.load(), 18u);
  });
}

template <typename T>
void ExpectSum(DType dtype, int rank, int size, Program& program) {
  std::vector<T> source(5, static_cast<T>(rank + 1));
  std::vector<T> target(5);
  Request request = RequestFor(OperationKind::kAllreduce, Name(dtype), {5});
  request.dtype = dtype;
  const Status status = program.Finish(program.TrySubmit(request, source.data(), target.data()));
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(target, std::vector<T>(5, static_cast<T>(size * (size + 1) / 2))) << Name(dtype);
  EXPECT_EQ(source[0], static_cast<T>(rank + 1));
}

TEST_P(EngineDevices, ReduceTheElementTypesOfNccl) {
  Run([this](int rank, Rank&, Program& program) {
    ExpectSum<uint8_t>(DType::kUInt8, rank, size(), program);
    ExpectSum<int8_t>(DType::kInt8, rank, size(), program);
    ExpectSum<int32_t>(DType::kInt32, rank, size(), program);
    ExpectSum<int64_t>(DType::kInt64, rank, size(), program);
    ExpectSum<double>(DType::kFloat64, rank, size(), program);
    // The bits of 1.0 in both small types. Sums with zeros keep it.
    for (const auto& [dtype, one] : {std::pair{DType::kFloat16, uint16_t{0x3c00}},
                                     std::pair{DType::kBFloat16, uint16_t{0x3f80}}}) {
      std::vector<uint16_t> data(3, rank == 0 ? one : uint16_t{0});
      Request request = RequestFor(OperationKind::kAllreduce, Name(dtype), {3});
      request.dtype = dtype;
      EXPECT_TRUE(program.Finish(program.TrySubmit(request, data.data(), data.data())).ok());
      EXPECT_EQ(data, std::vector<uint16_t>(3, one)) << Name(dtype);
    }
  });
}

TEST_P(EngineDevices, BroadcastAnyElementType) {
  Run([this](int rank, Rank&, Program& program) {
    std::vector<uint16_t> data(9, static_cast<uint16_t>(rank));
    Request request = RequestFor(OperationKind::kBroadcast, "broadcast", {3, 3});
    request.dtype = DType::kInt16;
    request.root = size() - 1;
    EXPECT_TRUE(program.Finish(program.TrySubmit(request, data.data(), data.data())).ok());
    EXPECT_EQ(data, std::vector<uint16_t>(9, static_cast<uint16_t>(size() - 1)));
  });
}

TEST_P(EngineDevices, GatherRowsOfEveryLength) {
  Run([this](int rank, Rank&, Program& program) {
    for (const bool ragged : {false, true}) {
      for (int round = 0; round < 3; ++round) {
        const int64_t rows = ragged ? rank : 2;
        std::vector<float> own(static_cast<size_t>(rows), static_cast<float>(rank));
        const Result<Pointer> gathered = program.TrySubmit(
            RequestFor(OperationKind::kAllgather, ragged ? "ragged" : "even", {rows}), own.data(),
            nullptr);
        ASSERT_TRUE(FailureOf(gathered).ok());
        std::vector<float> expected;
        for (int r = 0; r < size(); ++r) {
          expected.insert(expected.end(), static_cast<size_t>(ragged ? r : 2),
                          static_cast<float>(r));
        }
        EXPECT_EQ(program.Output<float>(*gathered.value()), expected);
      }
    }
  });
}

TEST_P(EngineDevices, ExchangeRows) {
  Run([this](int rank, Rank&, Program& program) {
    std::vector<int64_t> splits;
    std::vector<float> source;
    for (int to = 0; to < size(); ++to) {
      splits.push_back((rank + to) % 3);
      source.insert(source.end(), static_cast<size_t>(splits.back()),
                    static_cast<float>(rank * 10 + to));
    }
    Request request =
        RequestFor(OperationKind::kAlltoall, "exchange", {static_cast<int64_t>(source.size())});
    request.splits = splits;
    const Result<Pointer> operation = program.TrySubmit(request, source.data(), nullptr);
    ASSERT_TRUE(FailureOf(operation).ok());
    std::vector<float> expected;
    for (int from = 0; from < size(); ++from) {
      EXPECT_EQ(operation.value()->rows()[static_cast<size_t>(from)], (rank + from) % 3);
      expected.insert(expected.end(), static_cast<size_t>((rank + from) % 3),
                      static_cast<float>(from * 10 + rank));
    }
    EXPECT_EQ(program.Output<float>(*operation.value()), expected);
  });
}

TEST_P(EngineDevices, ReducescatterWhetherRowsCanBeDividedOrNot) {
  Run([this](int rank, Rank&, Program& program) {
    for (const int64_t more : {0, 1}) {
      const int64_t rows = 2 * size() + more;
      std::vector<float> source(static_cast<size_t>(rows) * 3);
      std::iota(source.begin(), source.end(), static_cast<float>(rank));
      const bool long_part = rank < more;
      std::vector<float> target(long_part ? 9 : 6);
      const Status status = program.Finish(
          program.TrySubmit(RequestFor(OperationKind::kReducescatter, "scatter", {rows, 3}),
                            source.data(), target.data()));
      ASSERT_TRUE(status.ok()) << status.message();
      const int64_t first = (2 * rank + std::min<int64_t>(rank, more)) * 3;
      for (size_t i = 0; i < target.size(); ++i) {
        const auto place = static_cast<float>(first + static_cast<int64_t>(i));
        EXPECT_EQ(target[i], place * static_cast<float>(size()) +
                                 static_cast<float>(size() * (size() - 1) / 2));
      }
    }
  });
}

TEST_P(EngineDevices, AGroupIsOneGroupOfNccl) {
  Run([this](int, Rank& self, Program& program) {
    const int before = simulated::Calls("ncclAllReduce");
    std::vector<std::vector<float>> data(6, std::vector<float>(11, 1.0f));
    std::vector<Engine::Submission> submissions;
    for (size_t i = 0; i < data.size(); ++i) {
      Request request = RequestFor(OperationKind::kAllreduce, "group." + std::to_string(i), {11});
      request.op = i % 2 == 0 ? ReduceOp::kSum : ReduceOp::kMax;
      request.group = "group";
      request.group_size = static_cast<uint32_t>(data.size());
      submissions.push_back(
          {std::move(request), BytesOf(data[i]), BytesOf(data[i]), program.device()});
    }
    const auto operations = self.engine.SubmitAll(std::move(submissions));
    ASSERT_TRUE(operations.ok()) << operations.status().message();
    for (size_t i = 0; i < data.size(); ++i) {
      EXPECT_TRUE(program.Finish(operations.value()[i]).ok());
      EXPECT_EQ(data[i][10], i % 2 == 0 ? static_cast<float>(size()) : 1.0f);
    }
    EXPECT_EQ(self.engine.counters().on_device.load(), 1u);
    EXPECT_GE(simulated::Calls("ncclAllReduce"), before + 6);
  });
}

TEST_P(EngineDevices, RunBesideTensorsOfTheHost) {
  Run([this](int, Rank& self, Program& program) {
    for (int round = 0; round < 20; ++round) {
      std::vector<float> here(5, 1.0f);
      std::vector<float> there(5, 1.0f);
      const Result<Pointer> device = program.TryAllreduce("device", there);
      const Pointer host = self.AllreduceWithWaiter("host", here);
      EXPECT_TRUE(self.engine.Wait(*host, Patience()).ok());
      EXPECT_TRUE(program.Finish(device).ok());
      EXPECT_EQ(here[4], static_cast<float>(size()));
      EXPECT_EQ(there[4], static_cast<float>(size()));
    }
  });
}

TEST_P(EngineDevices, RanksThatJoinedContributeNothing) {
  Run([this](int rank, Rank& self, Program& program) {
    for (int turn = 0; turn < 2; ++turn) {
      for (int step = 0; step < rank; ++step) {
        std::vector<float> sum(5, 1.0f);
        EXPECT_TRUE(program.Finish(program.TryAllreduce("sum", sum)).ok());
        EXPECT_EQ(sum[4], static_cast<float>(size() - 1 - step));
        std::vector<float> lowest(5, static_cast<float>(rank));
        EXPECT_TRUE(program.Finish(program.TryAllreduce("min", lowest, ReduceOp::kMin)).ok());
        EXPECT_EQ(lowest[0], static_cast<float>(step + 1));
        std::vector<float> own(1, static_cast<float>(rank));
        const Result<Pointer> gathered = program.TrySubmit(
            RequestFor(OperationKind::kAllgather, "rows", {1}), own.data(), nullptr);
        EXPECT_TRUE(FailureOf(gathered).ok());
        EXPECT_EQ(program.Output<float>(*gathered.value()).size(),
                  static_cast<size_t>(size() - 1 - step));
      }
      // A rank that has used no device names its own with its join.
      const Result<Pointer> join =
          program.TrySubmit(RequestFor(OperationKind::kJoin, kJoinName, {0}), nullptr, nullptr);
      ASSERT_TRUE(FailureOf(join).ok());
      EXPECT_TRUE(self.BarrierAndWait("together").ok());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, EngineDevices,
                         ::testing::Values(OneHost(1), OneHost(2), OneHost(3),
                                           std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1}));

TEST(EngineDevice, WaitsForTheWorkOnTheProgramsStream) {
  OnEveryDevice(OneHost(2), WithDevices(), [](int rank, Rank& self, Program& program) {
    std::vector<float> data(4, 0.0f);
    const std::vector<float> computed(4, static_cast<float>(rank + 1));
    const Result<std::shared_ptr<const Device>> device =
        Device::Open(SimulatedLibraries().cuda, rank);
    ASSERT_TRUE(device.ok());
    const auto* content = reinterpret_cast<const std::byte*>(computed.data());
    Result<DeviceMemory> memory =
        device.value()->Upload(ConstBytes(content, computed.size() * sizeof(float)));
    ASSERT_TRUE(memory.ok());
    const auto uploaded = device.value()->Record(device.value()->stream());
    ASSERT_TRUE(uploaded.value()->LetWait(program.stream().handle()).ok());

    simulated::Hold(rank);
    ASSERT_TRUE(memory.value().MoveTo(BytesOf(data), program.stream().handle()).ok());
    const Result<Pointer> operation = program.TryAllreduce("sum", data);
    EXPECT_TRUE(FailureOf(operation).ok()) << "the host does not wait for the device";
    EXPECT_FALSE(operation.value()->settled());
    EXPECT_TRUE(self.BarrierAndWait("both have submitted").ok());
    EXPECT_EQ(data[0], 0.0f);
    simulated::Release(rank);
    EXPECT_TRUE(program.Finish(operation).ok());
    EXPECT_EQ(data, std::vector<float>(4, 3.0f));
    EXPECT_TRUE(operation.value()->settled());
  });
}

// The engines of the job and of pairs of its ranks. A rank's engines share its device.
class EngineDeviceSets : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;
  using Pair = std::pair<int, int>;

  EngineDeviceSets() {
    for (const Pair& pair : {Pair{0, 1}, Pair{1, 2}, Pair{0, 2}}) {
      EngineConfig config = config_;
      config.shares_device = true;
      config.label = "ranks " + std::to_string(pair.first) + " and " + std::to_string(pair.second);
      auto store = std::make_shared<InProcessStore>();
      std::vector<Mesh> meshes = InProcessMeshes(OneHost(2));
      pairs_[{pair.first, pair}] = std::make_unique<Rank>(config, std::move(meshes[0]), store);
      pairs_[{pair.second, pair}] = std::make_unique<Rank>(config, std::move(meshes[1]), store);
    }
  }

  // Passes the pairs of the rank to `body`.
  void Run(const std::function<void(int, Rank&, Program&, std::vector<Rank*>)>& body) {
    OnEveryRank(InProcessMeshes(OneHost(kRanks)), config_, [&](int rank, Rank& self) {
      std::vector<Rank*> own;
      for (auto& [key, engine] : pairs_) {
        if (key.first == rank) own.push_back(engine.get());
      }
      {
        Program program(rank, self.engine);
        body(rank, self, program, own);
      }
      for (Rank* pair : own) EXPECT_TRUE(pair->engine.Shutdown(Patience()).ok());
      EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
    });
    pairs_.clear();
    ExpectCleanDevices();
  }

 private:
  const EngineConfig config_ = WithDevices();
  std::map<std::pair<int, Pair>, std::unique_ptr<Rank>> pairs_;
};

TEST_F(EngineDeviceSets, ReduceIndependentlyOfTheJob) {
  Run([](int rank, Rank& self, Program& program, const std::vector<Rank*>& pairs) {
    ASSERT_TRUE(self.BarrierAndWait(kShareDeviceName).ok());
    for (int round = 0; round < 10; ++round) {
      std::vector<float> data(4, 1.0f);
      const Result<Pointer> all = program.TryAllreduce("all", data);
      for (Rank* pair : pairs) {
        Program in_pair(rank, pair->engine);
        std::vector<float> more(4, 1.0f);
        EXPECT_TRUE(in_pair.Finish(in_pair.TryAllreduce("all", more)).ok());
        EXPECT_EQ(more[3], 2.0f);
      }
      EXPECT_TRUE(program.Finish(all).ok());
      EXPECT_EQ(data[3], 3.0f);
    }
  });
}

// Every rank submits to its engines in another order, all at once. A real device deadlocks unless
// the ranks agree on one order.
TEST_F(EngineDeviceSets, LaunchInOneOrderForAnyOrderOfSubmissions) {
  Run([](int rank, Rank& self, Program& program, const std::vector<Rank*>& pairs) {
    ASSERT_TRUE(self.BarrierAndWait(kShareDeviceName).ok());
    constexpr int kSteps = 40;
    std::vector<Program*> programs{&program};
    Program first(rank, pairs[0]->engine);
    Program second(rank, pairs[1]->engine);
    programs.insert(rank == 1 ? programs.begin() : programs.end(), &first);
    programs.insert(rank == 2 ? programs.begin() : programs.end(), &second);
    std::vector<std::vector<float>> data(3 * kSteps, std::vector<float>(3, 1.0f));
    std::vector<std::pair<Program*, Result<Pointer>>> submitted;
    for (size_t i = 0; i < data.size(); ++i) {
      Program* on = programs[(i / 3) % 2 == 0 ? i % 3 : 2 - i % 3];
      submitted.emplace_back(on, on->TryAllreduce(std::to_string(i / 3), data[i]));
    }
    for (size_t i = 0; i < data.size(); ++i) {
      const auto& [on, operation] = submitted[i];
      const Status status = on->Finish(operation);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(data[i][0], on == &program ? 3.0f : 2.0f);
    }
  });
}

TEST(EngineDevice, MemoryOfTheHostOnOneRankIsAMismatch) {
  OnEveryDevice(OneHost(3), WithDevices(), [](int rank, Rank& self, Program& program) {
    for (int round = 0; round < 2; ++round) {  // in the second round, some ranks request by id
      std::vector<float> data(4, 1.0f);
      const Result<Pointer> mixed = rank == 2 && round == 0 ? self.TryAllreduce("mixed", data)
                                                            : program.TryAllreduce("mixed", data);
      if (round > 0) {
        EXPECT_TRUE(program.Finish(mixed).ok()) << "the name is free again";
        continue;
      }
      ExpectFailure(FailureOf(mixed), StatusCode::kMismatch,
                    {"allreduce 'mixed'", "about the memory", "rank 0 submitted a tensor in CUDA",
                     "rank 2 submitted a tensor in host memory"});
    }
  });
}

TEST(EngineDevice, InvalidRequestsAreRefusedAtOnce) {
  const ProgramStream elsewhere(5);
  OnEveryDevice(OneHost(1), WithDevices(), [&](int, Rank& self, Program& program) {
    std::vector<float> data(4);
    ExpectFailure(FailureOf(program.TryAllreduce("x", data, ReduceOp::kAdasum)),
                  StatusCode::kInvalidArgument, {"NCCL does not support adasum of float32"});
    Request request = RequestFor(OperationKind::kAllreduce, "x", {2});
    request.dtype = DType::kInt16;
    ExpectFailure(FailureOf(program.TrySubmit(request, data.data(), data.data())),
                  StatusCode::kInvalidArgument, {"NCCL does not support sum of int16"});
    request.dtype = DType::kInt32;
    request.op = ReduceOp::kAverage;
    ExpectFailure(FailureOf(program.TrySubmit(request, data.data(), data.data())),
                  StatusCode::kInvalidArgument, {"NCCL does not support average of int32"});
    EXPECT_TRUE(program.Finish(program.TryAllreduce("x", data)).ok());
    ExpectFailure(FailureOf(self.engine.Submit(RequestFor(OperationKind::kAllreduce, "y", {4}),
                                               BytesOf(data), BytesOf(data), Start::kNow,
                                               DeviceStream{5, elsewhere.handle()})),
                  StatusCode::kInvalidArgument,
                  {"allreduce 'y'", "device 5", "first collective", "device 0"});
  });
  OnEveryDevice(OneHost(1), Quick(), [](int, Rank&, Program& program) {
    std::vector<float> data(4);
    ExpectFailure(FailureOf(program.TryAllreduce("x", data)), StatusCode::kInvalidArgument,
                  {"without NCCL"});
  });
}

TEST(EngineDevice, TwoRanksOnOneDeviceAreRefusedWithARemedy) {
  const ProgramStream shared(7);
  OnEveryRank(InProcessMeshes(OneHost(2)), WithDevices(), [&](int, Rank& self) {
    std::vector<float> data(4);
    const Status status =
        FailureOf(self.engine.Submit(RequestFor(OperationKind::kAllreduce, "x", {4}), BytesOf(data),
                                     BytesOf(data), Start::kNow, DeviceStream{7, shared.handle()}));
    ExpectFailure(status, StatusCode::kInvalidArgument,
                  {"connecting NCCL", "every rank needs a GPU of its own", "gpus_per_task=1"});
  });
  ExpectCleanDevices();
}

void AwaitFailure(const Engine& engine, StatusCode code, const std::vector<std::string>& words) {
  const Deadline deadline = Patience();
  while (engine.Failure().ok() && !deadline.Expired()) std::this_thread::yield();
  ExpectFailure(engine.Failure(), code, words);
}

TEST(EngineDevice, ACallThatFailsOnOneRankFailsAllRanks) {
  for (const char* call :
       {"ncclAllReduce", "ncclCommInitRankConfig", "ncclGetUniqueId", "cuStreamWaitEvent"}) {
    simulated::FailNext(call, 3);
    OnEveryDevice(OneHost(2), WithDevices(), [call](int, Rank& self, Program& program) {
      std::vector<float> data(4, 1.0f);
      const Status first = program.Finish(program.TryAllreduce("sum", data));
      // The rank with valid calls has no error of its own, and learns of the other rank's error
      // now.
      const Status status = first.ok() ? self.BarrierAndWait("after") : first;
      ExpectFailure(status, StatusCode::kIo, {std::string(call) + " failed"});
      AwaitFailure(self.engine, StatusCode::kIo, {std::string(call) + " failed"});
    });
  }
}

TEST(EngineDevice, AnAsynchronousErrorEndsTheEngine) {
  Gate held(2);
  OnEveryDevice(OneHost(2), WithDevices(), [&held](int rank, Rank& self, Program& program) {
    simulated::Hold(rank);
    std::vector<float> data(4, 1.0f);
    EXPECT_TRUE(FailureOf(program.TryAllreduce("sum", data)).ok());
    held.Meet();
    if (rank == 0) simulated::BreakCommunicators(kNcclRemoteError);
    AwaitFailure(self.engine, StatusCode::kPeerLost, {"allreduce 'sum'", "NCCL failed"});
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());  // the buffer is no longer in use
    simulated::Release(rank);
    ExpectFailure(FailureOf(program.TryAllreduce("next", data)), StatusCode::kPeerLost,
                  {"allreduce 'next'", "NCCL failed"});
  });
}

TEST(EngineDevice, AHangingDeviceTimesOut) {
  OnEveryDevice(OneHost(2), WithDevices(2.0), [](int rank, Rank& self, Program& program) {
    if (rank == 1) simulated::Hold(rank);
    std::vector<float> data(4, 1.0f);
    const Result<Pointer> operation = program.TryAllreduce("sum", data);
    EXPECT_TRUE(FailureOf(operation).ok());
    AwaitFailure(self.engine, StatusCode::kTimeout,
                 {"allreduce 'sum'", "not finished there", "some rank may have failed"});
    if (rank == 1) simulated::Release(rank);
    EXPECT_TRUE(operation.value()->device()->LetWait(program.stream().handle()).ok());
    program.stream().Await();  // the timed-out operation blocks nothing
  });
}

TEST(EngineDevice, ALostRankIsDetectedWhileOthersWaitForTheirDevices) {
  Gate submitted(3);
  OnEveryDevice(OneHost(3), WithDevices(), [&](int rank, Rank& self, Program& program) {
    if (rank == 2) simulated::Hold(rank);
    std::vector<float> data(4, 1.0f);
    EXPECT_TRUE(FailureOf(program.TryAllreduce("sum", data)).ok());
    submitted.Meet();
    if (rank == 2) {
      self.engine.Abort("out of memory");
      EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
      simulated::Release(rank);
      return;
    }
    AwaitFailure(self.engine, StatusCode::kAborted, {"rank 2: out of memory"});
    program.stream().Await();
  });
}

TEST(EngineDevice, AKilledProcessIsDetectedByDevicesThatWaitForIt) {
  const auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret");
  ASSERT_TRUE(server.ok());
  std::vector<std::shared_ptr<TcpStoreClient>> clients;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Mesh& mesh : InProcessMeshes(OneHost(2))) {
    auto client = TcpStoreClient::Connect({server.value()->address()}, "secret", Patience());
    ASSERT_TRUE(client.ok());
    clients.push_back(std::move(client).value());
    ranks.push_back(std::make_unique<Rank>(WithDevices(), std::move(mesh), clients.back()));
  }
  Gate submitted(2);
  Gate noticed(2);
  const auto run = [&](int rank) {
    Engine& engine = ranks[static_cast<size_t>(rank)]->engine;
    Program program(rank, engine);
    if (rank == 1) simulated::Hold(1);
    std::vector<float> data(4, 1.0f);
    EXPECT_TRUE(FailureOf(program.TryAllreduce("sum", data)).ok());
    submitted.Meet();
    if (rank == 1) {
      clients[1]->Close();  // the rest of its process is not part of the test
    } else {
      AwaitFailure(engine, StatusCode::kPeerLost, {"rank 1: its process has ended"});
      program.stream().Await();
    }
    noticed.Meet();
    engine.Abort("the test ends");
    EXPECT_TRUE(engine.Shutdown(Patience()).ok());
    if (rank == 1) simulated::Release(1);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

TEST(EngineDevice, ShutdownWaitsForPendingDeviceWork) {
  for (int round = 0; round < 10; ++round) {
    OnEveryDevice(OneHost(2), WithDevices(), [](int, Rank& self, Program& program) {
      std::vector<float> data(4, 1.0f);
      const Result<Pointer> operation = program.TryAllreduce("last", data);
      EXPECT_TRUE(FailureOf(operation).ok());
      EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
      EXPECT_TRUE(operation.value()->settled());
      EXPECT_EQ(data[3], 2.0f);
    });
  }
}

// The root of a broadcast is done once NCCL has taken over its data.
TEST(EngineDevice, ARankThatLeavesFirstDoesNotInterruptTransfersToOthers) {
  auto store = std::make_shared<InProcessStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Mesh& mesh : InProcessMeshes(OneHost(2))) {
    ranks.push_back(std::make_unique<Rank>(WithDevices(), std::move(mesh), store));
  }
  const auto run = [&](int rank) {
    Engine& engine = ranks[static_cast<size_t>(rank)]->engine;
    Program program(rank, engine);
    if (rank == 0) simulated::Hold(rank);
    std::vector<float> data(4, static_cast<float>(rank));
    Request request = RequestFor(OperationKind::kBroadcast, "last", {4});
    request.root = 1;
    EXPECT_TRUE(FailureOf(program.TrySubmit(request, data.data(), data.data())).ok());
    if (rank == 0) {
      EXPECT_TRUE(store->Get("test/done/1", Patience()).ok()) << "the root is leaving";
      simulated::Release(rank);
    }
    EXPECT_TRUE(engine.Shutdown(Patience()).ok());
    EXPECT_EQ(data, std::vector<float>(4, 1.0f));
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  ranks.clear();
  ExpectCleanDevices();
}

TEST(EngineDevice, ARankThatLeavesAloneKeepsItsCommunicator) {
  const int aborted = simulated::Calls("ncclCommAbort");
  Gate left(2);
  OnEveryDevice(OneHost(2), WithDevices(), [&](int rank, Rank& self, Program& program) {
    if (rank == 1) simulated::Hold(rank);
    std::vector<float> data(4, static_cast<float>(rank + 1));
    const Result<Pointer> operation = program.TrySubmit(
        RequestFor(OperationKind::kBroadcast, "last", {4}), data.data(), data.data());
    EXPECT_TRUE(FailureOf(operation).ok());
    if (rank == 0) {
      EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
    }
    left.Meet();
    if (rank == 1) {
      EXPECT_EQ(simulated::Calls("ncclCommAbort"), aborted);
      simulated::Release(rank);
      EXPECT_TRUE(program.Finish(operation).ok());
      EXPECT_EQ(data, std::vector<float>(4, 1.0f));
    }
  });
}

// Like an operation behind a long queue of the program's own work.
TEST(EngineDevice, AResultArrivesEvenIfItsRankHasLeft) {
  const int aborted = simulated::Calls("ncclCommAbort");
  Gate left(2);
  OnEveryDevice(OneHost(2), WithDevices(), [&](int rank, Rank& self, Program& program) {
    simulated::Hold(rank);
    std::vector<float> data(4, 1.0f);
    const Result<Pointer> operation = program.TryAllreduce("last", data);
    EXPECT_TRUE(FailureOf(operation).ok());
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
    left.Meet();
    EXPECT_EQ(simulated::Calls("ncclCommAbort"), aborted);
    simulated::Release(rank);
    EXPECT_TRUE(program.Finish(operation).ok());
    EXPECT_EQ(data, std::vector<float>(4, 2.0f));
  });
}

TEST(EngineDevice, TensorsSubmittedTogetherShareAnEventAndEventsAreReused) {
  OnEveryDevice(OneHost(1), WithDevices(), [](int, Rank& self, Program& program) {
    const int before = simulated::Calls("cuEventCreate");
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<float>> data(8, std::vector<float>(2, 1.0f));
      std::vector<Engine::Submission> submissions;
      for (size_t i = 0; i < data.size(); ++i) {
        Request request = RequestFor(OperationKind::kAllreduce, "group." + std::to_string(i), {2});
        request.group = "group";
        request.group_size = static_cast<uint32_t>(data.size());
        submissions.push_back(
            {std::move(request), BytesOf(data[i]), BytesOf(data[i]), program.device()});
      }
      const auto operations = self.engine.SubmitAll(std::move(submissions));
      ASSERT_TRUE(operations.ok());
      for (const Pointer& operation : operations.value()) {
        EXPECT_TRUE(program.Finish(operation).ok());
      }
    }
    EXPECT_LE(simulated::Calls("cuEventCreate"), before + 4);
  });
}

TEST(EngineDevice, ARankThatJoinsWithoutADeviceIsNamed) {
  OnEveryDevice(OneHost(2), WithDevices(), [](int rank, Rank& self, Program& program) {
    std::vector<float> data(4, 1.0f);
    const Result<Pointer> operation =
        rank == 0 ? program.TryAllreduce("sum", data)
                  : self.engine.Submit(RequestFor(OperationKind::kJoin, kJoinName, {0}), nullptr,
                                       nullptr);
    ExpectFailure(FailureOf(operation), StatusCode::kInvalidArgument,
                  {"rank 1", "has joined without ever using a CUDA device", "join()"});
  });
}

}  // namespace
}  // namespace sparkhvd
