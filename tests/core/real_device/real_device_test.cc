// Tests operations in the memory of real devices with the real CUDA and NCCL. `make test-gpu`
// passes the path of NCCL; without it, these tests are skipped.
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>

#include "device/library.h"
#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

constexpr size_t kMostDevices = 8;
// Floats in the memory of a device.
class Floats {
 public:
  Floats(const Device& device, size_t count, float value) : device_(device), count_(count) {
    Result<Library> driver = Library::Open("libcuda.so.1");
    EXPECT_TRUE(driver.ok());
    int (*allocate)(CudaAddress*, size_t) = nullptr;
    int (*write)(CudaAddress, const void*, size_t) = nullptr;
    EXPECT_TRUE(driver.value().Find("cuMemAlloc_v2", allocate).ok());
    EXPECT_TRUE(driver.value().Find("cuMemFree_v2", free_).ok());
    EXPECT_TRUE(driver.value().Find("cuMemcpyHtoD_v2", write).ok());
    EXPECT_TRUE(driver.value().Find("cuMemcpyDtoH_v2", read_).ok());
    const Device::Current current(device_);
    EXPECT_EQ(allocate(&address_, count * sizeof(float)), kCudaSuccess);
    const std::vector<float> values(count, value);
    EXPECT_EQ(write(address_, values.data(), count * sizeof(float)), kCudaSuccess);
  }
  ~Floats() {
    const Device::Current current(device_);
    free_(address_);
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  std::byte* bytes() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT
  std::vector<float> values() const {
    std::vector<float> values(count_);
    const Device::Current current(device_);
    EXPECT_EQ(read_(values.data(), address_, count_ * sizeof(float)), kCudaSuccess);
    return values;
  }

 private:
  const Device& device_;
  const size_t count_;
  CudaAddress address_ = 0;
  int (*free_)(CudaAddress) = nullptr;
  int (*read_)(void*, CudaAddress, size_t) = nullptr;
};

class RealDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* nccl = std::getenv("SPARKHVD_TEST_NCCL");
    if (nccl == nullptr) GTEST_SKIP() << "make test-gpu runs this where there is a GPU";
    Result<DeviceLibraries> loaded = LoadDeviceLibraries("libcuda.so.1", nccl);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    libraries_ = std::make_shared<DeviceLibraries>(std::move(loaded).value());
    while (devices_.size() < kMostDevices) {
      auto opened = libraries_->Open(static_cast<int>(devices_.size()));
      if (!opened.ok()) break;
      devices_.push_back(std::move(opened).value());
    }
    ASSERT_FALSE(devices_.empty());
  }

  EngineConfig Config() const {
    EngineConfig config = Quick(60);
    config.device_libraries = libraries_;
    return config;
  }

  static void AwaitDevice(const Device& device) {
    const auto reached = device.Record(device.stream());
    ASSERT_TRUE(reached.ok()) << reached.status().message();
    while (!reached.value()->Reached()) std::this_thread::yield();
  }

  Result<Pointer> Sum(Engine& engine, const std::string& name, const Device& device,
                      const Floats& memory, int64_t count) const {
    Request request;
    request.name = name;
    request.shape = {count};
    return engine.Submit(std::move(request), memory.bytes(), memory.bytes(), Start::kNow,
                         DeviceStream{device.ordinal(), device.stream()});
  }

  static void Finish(const Result<Pointer>& operation) {
    const Status status = FailureOf(operation);
    ASSERT_TRUE(status.ok()) << status.message();
    while (!operation.value()->device()->Finished()) std::this_thread::yield();
  }

  std::shared_ptr<const DeviceLibraries> libraries_;
  std::vector<std::shared_ptr<const Device>> devices_;
};

TEST_F(RealDevices, AllocateCopyAndFreeMemory) {
  for (const auto& device : devices_) {
    const Floats target(*device, 100, 0.0f);
    std::vector<float> content(100);
    std::iota(content.begin(), content.end(), 0.0f);
    for (int round = 0; round < 50; ++round) {
      Result<DeviceMemory> memory = device->Upload(ConstBytes(
          reinterpret_cast<const std::byte*>(content.data()), content.size() * sizeof(float)));
      ASSERT_TRUE(memory.ok()) << memory.status().message();
      const Status moved = memory.value().MoveTo(target.bytes(), device->stream());
      ASSERT_TRUE(moved.ok()) << moved.message();
    }
    AwaitDevice(*device);
    EXPECT_EQ(target.values(), content);
  }
}

TEST_F(RealDevices, ReduceOnAllDevicesAndShutDownInOrder) {
  const auto size = static_cast<int>(devices_.size());
  OnEveryRank(InProcessMeshes(OneHost(size)), Config(), [&](int rank, Rank& self) {
    const Device& device = *devices_[static_cast<size_t>(rank)];
    const Floats memory(device, 1000, static_cast<float>(rank + 1));
    Finish(Sum(self.engine, "sum", device, memory, 1000));
    EXPECT_EQ(memory.values(), std::vector<float>(1000, static_cast<float>(size * (size + 1) / 2)));
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
  });
}

TEST_F(RealDevices, ReduceAmongPairsAndAllAtOnceInEveryOrder) {
  const auto size = static_cast<int>(devices_.size());
  if (size < 2) GTEST_SKIP() << "needs two GPUs";
  EngineConfig in_pair = Config();
  in_pair.shares_device = true;
  in_pair.label = "the first two";
  auto store = std::make_shared<InProcessStore>();
  std::vector<std::unique_ptr<Rank>> pair;
  for (Mesh& mesh : InProcessMeshes(OneHost(2))) {
    pair.push_back(std::make_unique<Rank>(in_pair, std::move(mesh), store));
  }
  OnEveryRank(InProcessMeshes(OneHost(size)), Config(), [&](int rank, Rank& self) {
    const Device& device = *devices_[static_cast<size_t>(rank)];
    ASSERT_TRUE(self.BarrierAndWait(kShareDeviceName).ok());
    for (int round = 0; round < 50; ++round) {
      const Floats all(device, 1 << 16, 1.0f);
      const Floats two(device, 1 << 16, 1.0f);
      std::vector<Result<Pointer>> submitted;
      const auto submit_pair = [&] {
        if (rank >= 2) return;
        Engine& engine = pair[static_cast<size_t>(rank)]->engine;
        submitted.push_back(Sum(engine, "pair", device, two, 1 << 16));
      };
      if (rank == 0) submit_pair();
      submitted.push_back(Sum(self.engine, "all", device, all, 1 << 16));
      if (rank == 1) submit_pair();
      for (const auto& operation : submitted) Finish(operation);
      EXPECT_EQ(all.values().back(), static_cast<float>(size));
      EXPECT_EQ(two.values().back(), rank < 2 ? 2.0f : 1.0f);
    }
    if (rank < 2) {
      EXPECT_TRUE(pair[static_cast<size_t>(rank)]->engine.Shutdown(Patience()).ok());
    }
    EXPECT_TRUE(self.engine.Shutdown(Patience()).ok());
  });
}

}  // namespace
}  // namespace sparkhvd
