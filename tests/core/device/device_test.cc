#include "device/device.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "simulated_device/libraries.h"

namespace sparkhvd {
namespace {

constexpr int kFloat = 7;  // NCCL's number of float32
constexpr int kSum = 0;

std::shared_ptr<const Device> Opened(int ordinal) {
  Result<std::shared_ptr<const Device>> device = Device::Open(SimulatedLibraries().cuda, ordinal);
  EXPECT_TRUE(device.ok()) << device.status().message();
  return std::move(device).value();
}

void ExpectFailure(const Status& status, StatusCode code, const std::string& words) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(words), std::string::npos) << words << " in " << status.message();
}

TEST(DeviceLibraries, NameTheMissingLibraryOrFunction) {
  const std::string simulation = SPARKHVD_SIMULATED_DEVICE;
  ExpectFailure(LoadDeviceLibraries("/nowhere/libcuda.so.1", simulation).status(), StatusCode::kIo,
                "cannot load /nowhere/libcuda.so.1");
  ExpectFailure(LoadDeviceLibraries(simulation, "libc.so.6").status(), StatusCode::kIo,
                "libc.so.6 has no function ncclGetVersion");
  simulated::SetNcclVersion(2803);
  ExpectFailure(LoadDeviceLibraries(simulation, simulation).status(), StatusCode::kIo,
                "2.14.0 or newer is needed");
  simulated::SetNcclVersion(22907);
  simulated::FailNext("cuInit", 100);
  ExpectFailure(LoadDeviceLibraries(simulation, simulation).status(), StatusCode::kIo,
                "cuInit failed with error 100: simulated failure");
  EXPECT_EQ(SimulatedLibraries().nccl->version, 22907);
}

TEST(Device, IsNamedIfMissing) {
  ExpectFailure(Device::Open(SimulatedLibraries().cuda, 99).status(), StatusCode::kIo,
                "CUDA device 99: cuDeviceGet failed");
}

TEST(Device, AnEventIsReachedOnceItsStreamIs) {
  const std::shared_ptr<const Device> device = Opened(0);
  const ProgramStream program(0);
  simulated::Hold(0);
  const Result<std::unique_ptr<DeviceEvent>> event = device->Record(device->stream());
  ASSERT_TRUE(event.ok()) << event.status().message();
  EXPECT_FALSE(event.value()->Reached());
  EXPECT_TRUE(event.value()->LetWait(program.handle()).ok());
  simulated::Release(0);
  program.Await();
  EXPECT_TRUE(event.value()->Reached());
}

TEST(Device, MemoryIsAllocatedCopiedAndFreedInTheOrderOfStreams) {
  {
    const std::shared_ptr<const Device> device = Opened(1);
    const ProgramStream program(1);
    std::vector<std::byte> content(100, std::byte{7});
    Result<DeviceMemory> memory = device->Upload(ConstBytes(content.data(), content.size()));
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    const Result<std::unique_ptr<DeviceEvent>> filled = device->Record(device->stream());
    ASSERT_TRUE(filled.ok());
    std::vector<std::byte> target(100);
    EXPECT_TRUE(filled.value()->LetWait(program.handle()).ok());
    EXPECT_TRUE(memory.value().MoveTo(target.data(), program.handle()).ok());
    EXPECT_TRUE(memory.value().MoveTo(nullptr, program.handle()).ok()) << "nothing is left";
    program.Await();
    EXPECT_EQ(target, content);
    EXPECT_TRUE(device->Allocate(0).ok());
    const Result<DeviceMemory> unused = device->Allocate(8);
    EXPECT_EQ(simulated::Allocations(), 1u);
    simulated::FailNext("cuMemAllocFromPoolAsync", 2);
    ExpectFailure(device->Allocate(8).status(), StatusCode::kIo,
                  "cannot allocate 8 bytes on CUDA device 1");
  }
  EXPECT_EQ(simulated::Allocations(), 0u);
}

// A rank of a communicator.
struct Rank {
  int rank;
  std::shared_ptr<const Device> device;
  std::unique_ptr<NcclCommunicator> communicator;
};

class Communicators : public ::testing::Test {
 protected:
  static Waiting Soon() {
    return Waiting{Deadline::AfterSeconds(30), [] { return Status(); }};
  }

  // Runs `body` once per rank, each on a thread with a device, after all ranks have connected.
  void OnEveryRank(int size, const std::function<void(Rank&)>& body) {
    const DeviceLibraries libraries = SimulatedLibraries();
    const Result<NcclId> id = NcclCommunicator::NewId(*libraries.nccl);
    ASSERT_TRUE(id.ok());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const std::shared_ptr<const Device> device = Opened(rank);
        const Device::Current current(*device);
        auto connected = NcclCommunicator::Connect(libraries.nccl, id.value(), rank, size, Soon());
        ASSERT_TRUE(connected.ok()) << connected.status().message();
        Rank self{rank, device, std::move(connected).value()};
        body(self);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static NcclCall Sum(const Rank& self, std::vector<float>& data) {
    return NcclCall{"ncclAllReduce", [&](const NcclFunctions& nccl, ncclComm* communicator) {
                      return nccl.all_reduce(data.data(), data.data(), data.size(), kFloat, kSum,
                                             communicator, self.device->stream());
                    }};
  }
};

TEST_F(Communicators, CallsOfAGroupRunTogether) {
  OnEveryRank(3, [this](Rank& self) {
    std::vector<float> one(5, static_cast<float>(self.rank));
    std::vector<float> other(7, 1.0f);
    const Status status = self.communicator->Together({Sum(self, one), Sum(self, other)}, Soon());
    ASSERT_TRUE(status.ok()) << status.message();
    const auto finished = self.device->Record(self.device->stream());
    ASSERT_TRUE(finished.ok());
    while (!finished.value()->Reached()) std::this_thread::yield();
    EXPECT_EQ(one, std::vector<float>(5, 3.0f));
    EXPECT_EQ(other, std::vector<float>(7, 3.0f));
    EXPECT_TRUE(self.communicator->Failure().ok());
  });
}

TEST_F(Communicators, WaitForAMissingRankUntilTheDeadline) {
  const DeviceLibraries libraries = SimulatedLibraries();
  const std::shared_ptr<const Device> device = Opened(0);
  const Device::Current current(*device);
  const Result<NcclId> id = NcclCommunicator::NewId(*libraries.nccl);
  ASSERT_TRUE(id.ok());
  const Waiting briefly{Deadline::AfterSeconds(0.05), [] { return Status(); }};
  const auto late = NcclCommunicator::Connect(libraries.nccl, id.value(), 0, 2, briefly);
  ExpectFailure(late.status(), StatusCode::kTimeout, "ncclCommInitRankConfig is not done yet");
  const Result<NcclId> other = NcclCommunicator::NewId(*libraries.nccl);
  const Waiting in_vain{Deadline::AfterSeconds(30),
                        [] { return Status(StatusCode::kPeerLost, "rank 1 has ended"); }};
  const auto stopped = NcclCommunicator::Connect(libraries.nccl, other.value(), 0, 2, in_vain);
  ExpectFailure(stopped.status(), StatusCode::kPeerLost, "rank 1 has ended");
}

TEST_F(Communicators, ReportFailuresWithNcclsMessage) {
  std::vector<float> data(3, 1.0f);  // in use until the communicator is destroyed
  OnEveryRank(1, [&](Rank& self) {
    simulated::FailNext("ncclAllReduce", 3);
    ExpectFailure(self.communicator->Together({Sum(self, data)}, Soon()), StatusCode::kIo,
                  "ncclAllReduce failed: simulated error (details)");
    EXPECT_TRUE(self.communicator->Together({Sum(self, data)}, Soon()).ok()) << "no group is open";
    simulated::BreakCommunicators(kNcclRemoteError);
    ExpectFailure(self.communicator->Failure(), StatusCode::kPeerLost, "NCCL failed");
    ExpectFailure(self.communicator->Together({Sum(self, data)}, Soon()), StatusCode::kPeerLost,
                  "ncclGroupEnd failed");
  });
}

TEST_F(Communicators, FinishOnceAllOperationsAreComplete) {
  OnEveryRank(2, [](Rank& self) {
    std::vector<float> data(3, 1.0f);
    EXPECT_TRUE(self.communicator->Together({Sum(self, data)}, Soon()).ok());
    const auto finished = self.device->Record(self.device->stream());
    ASSERT_TRUE(finished.ok());
    while (!finished.value()->Reached()) std::this_thread::yield();
    const Status status = NcclCommunicator::Finish(std::move(self.communicator), Soon());
    EXPECT_TRUE(status.ok()) << status.message();
  });
  EXPECT_EQ(simulated::TakeMisuses(), std::vector<std::string>());
}

TEST_F(Communicators, AbortPendingOperationsWhenDestroyed) {
  OnEveryRank(2, [this](Rank& self) {
    if (self.rank == 1) return;
    std::vector<float> data(3, 1.0f);
    EXPECT_TRUE(self.communicator->Together({Sum(self, data)}, Soon()).ok());
    const auto finished = self.device->Record(self.device->stream());
    ASSERT_TRUE(finished.ok());
    self.communicator.reset();
    while (!finished.value()->Reached()) std::this_thread::yield();
  });
}

// Returns whether `turn` comes at once.
bool Comes(LaunchOrder::Turn& turn, uint64_t ticket) {
  const Waiting no_time{Deadline::AfterSeconds(0), [] { return Status(); }};
  return turn.Await(ticket, no_time).ok();
}

TEST(Order, ACollectiveWaitsForPossiblyEarlierCollectives) {
  LaunchOrder order;
  auto one = order.Propose("one");
  auto other = order.Propose("other");
  EXPECT_LT(one->proposal(), other->proposal());
  EXPECT_FALSE(Comes(*other, other->proposal())) << "the ranks of `one` may agree on its proposal";
  EXPECT_FALSE(Comes(*one, other->proposal() + 5));
  EXPECT_TRUE(Comes(*other, other->proposal()));
  other.reset();
  EXPECT_TRUE(Comes(*one, one->proposal()));
  EXPECT_GT(order.Propose("third")->proposal(), one->proposal())
      << "later than every agreed collective";
}

TEST(Order, EqualTicketsAreOrderedByTheNamesOfTheirCommunicators) {
  LaunchOrder order;
  auto b = order.Propose("b");
  auto a = order.Propose("a");
  EXPECT_FALSE(Comes(*b, 7));
  EXPECT_TRUE(Comes(*a, 7));
}

TEST(Order, ACancelledTurnDoesNotBlockOthers) {
  LaunchOrder order;
  auto first = order.Propose("first");
  auto second = order.Propose("second");
  const Status lost(StatusCode::kPeerLost, "lost rank 1");
  const Waiting waiting{Deadline::AfterSeconds(30), [&] { return lost; }};
  EXPECT_EQ(second->Await(2, waiting).code(), StatusCode::kPeerLost);
  first.reset();
  EXPECT_TRUE(Comes(*second, 2));
}

TEST(NcclNumbers, AreThoseOfItsInterface) {
  EXPECT_EQ(NcclType(DType::kBFloat16), 9);
  EXPECT_EQ(NcclType(DType::kInt64), 4);
  EXPECT_FALSE(NcclType(DType::kBool));
  EXPECT_FALSE(NcclType(DType::kInt16));
  EXPECT_EQ(NcclOperator(ReduceOp::kMin), 3);
  EXPECT_FALSE(NcclOperator(ReduceOp::kAdasum));
  EXPECT_EQ(sizeof(NcclConfig), 24u);
}

}  // namespace
}  // namespace sparkhvd
