// Counts the bytes that travel between hosts.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "collectives/allgather_hierarchical.h"
#include "collectives/allreduce_hierarchical.h"
#include "collectives/ranks.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::ExpectAllOk;
using testing::OnEveryRank;
using testing::Soon;

// Counts the bytes that a rank sends to each peer.
class CountingTransport final : public Transport {
 public:
  explicit CountingTransport(std::unique_ptr<Transport> inner)
      : inner_(std::move(inner)), sent_(static_cast<size_t>(inner_->size())) {}

  size_t SentTo(int peer) const { return sent_[static_cast<size_t>(peer)]; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    sent_[static_cast<size_t>(peer)] += data.size();
    return inner_->PostSend(peer, data);
  }
  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return inner_->PostReceive(peer, data);
  }
  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return inner_->PostReceiveUpTo(peer, data, length);
  }
  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    return inner_->Wait(tickets, deadline);
  }
  void Abort(const Status& why) override { inner_->Abort(why); }

 private:
  const std::unique_ptr<Transport> inner_;
  std::vector<size_t> sent_;  // indexed by peer
};

using HostPair = std::pair<int, int>;

// Returns the bytes that hosts send each other (and themselves, over links) while every rank runs
// `body`.
std::map<HostPair, size_t> BytesBetweenHosts(
    const std::vector<int>& hosts,
    const std::function<Status(int, Mesh&, ArenaSteps*, const Hierarchy&)>& body) {
  std::vector<Mesh> meshes = InProcessMeshes(hosts);
  std::vector<const CountingTransport*> counting;
  for (Mesh& mesh : meshes) {
    auto counted = std::make_unique<CountingTransport>(std::move(mesh.transport));
    counting.push_back(counted.get());
    mesh.transport = std::move(counted);
  }
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    std::optional<ArenaSteps> steps;
    if (mesh.arena) steps.emplace(*mesh.arena);
    return body(rank, mesh, steps ? &*steps : nullptr, Hierarchy(mesh.memory_groups, rank));
  }));
  std::map<HostPair, size_t> bytes;
  for (size_t from = 0; from < hosts.size(); ++from) {
    for (size_t to = 0; to < hosts.size(); ++to) {
      const size_t sent = counting[from]->SentTo(static_cast<int>(to));
      if (sent > 0) bytes[{hosts[from], hosts[to]}] += sent;
    }
  }
  return bytes;
}

constexpr size_t kCount = 96 * 1024;  // divides evenly among the lanes and hosts below

std::map<HostPair, size_t> BytesOfAllreduce(const std::vector<int>& hosts) {
  return BytesBetweenHosts(hosts, [](int, Mesh& mesh, ArenaSteps* steps, const Hierarchy& places) {
    Elements data(DType::kFloat32, kCount);
    std::vector<std::byte> scratch;
    return AllreduceHierarchical(*mesh.transport, steps, places, Reduction{}, data.data(),
                                 data.data(), kCount, scratch, Soon());
  });
}

TEST(Wire, AnAllreduceOfTwoHostsSendsTheDataOnceEachWayForAnyPlacement) {
  const std::map<HostPair, size_t> minimum = {{{0, 1}, kCount * 4}, {{1, 0}, kCount * 4}};
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{
           {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1, 1}, {0, 1, 1, 0, 0, 0, 1, 1}}) {
    EXPECT_EQ(BytesOfAllreduce(hosts), minimum) << ::testing::PrintToString(hosts);
  }
}

TEST(Wire, AnAllreduceOfManyHostsSendsTheMinimumAroundOneRingOfHosts) {
  const size_t share = 2 * 2 * kCount * 4 / 3;  // 2 (H - 1) / H of the data
  const std::map<HostPair, size_t> minimum = {{{0, 1}, share}, {{1, 2}, share}, {{2, 0}, share}};
  EXPECT_EQ(BytesOfAllreduce({0, 0, 1, 1, 2, 2}), minimum);
  EXPECT_EQ(BytesOfAllreduce({0, 1, 2, 2, 1, 0, 2}), minimum);
}

TEST(Wire, AnAllgatherSendsEveryHostItsMissingDataOnce) {
  const std::vector<int> hosts = {0, 1, 1, 0, 2, 2, 2};
  const std::vector<size_t> lengths = {1000, 0, 333, 70001, 5, 12, 1};
  const auto bytes = BytesBetweenHosts(hosts, [&](int rank, Mesh& mesh, ArenaSteps* steps,
                                                  const Hierarchy& places) {
    const std::vector<std::byte> own(lengths[static_cast<size_t>(rank)]);
    std::vector<std::byte> all(1000 + 333 + 70001 + 5 + 12 + 1);
    return AllgatherHierarchical(*mesh.transport, steps, places, ConstBytes(own.data(), own.size()),
                                 lengths, Bytes(all.data(), all.size()), Soon());
  });
  const std::map<HostPair, size_t> minimum = {
      {{0, 1}, 71001 + 18}, {{1, 2}, 333 + 71001}, {{2, 0}, 18 + 333}};
  EXPECT_EQ(bytes, minimum);
}

}  // namespace
}  // namespace sparkhvd
