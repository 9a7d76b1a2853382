#include "transport/memory_groups.h"

#include <gtest/gtest.h>

#include "transport/meshes.h"

namespace sparkhvd {
namespace {

using Groups = std::vector<std::vector<int>>;

std::vector<AddressRecord> OnHosts(const std::vector<std::string>& host_keys) {
  std::vector<AddressRecord> records;
  for (const std::string& host_key : host_keys) {
    AddressRecord record;
    record.host_key = host_key;
    record.shared_memory = true;
    record.arena_region_bytes = 4096;
    records.push_back(record);
  }
  return records;
}

TEST(MemoryGroups, AreTheRanksOfEachHost) {
  EXPECT_EQ(MemoryGroups(OnHosts({"a"})), (Groups{{0}}));
  EXPECT_EQ(MemoryGroups(OnHosts({"b", "a", "b", "c", "a"})), (Groups{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(MemoryGroups(OnHosts({"", "a", "", "a"})), (Groups{{0}, {1, 3}, {2}}))
      << "a rank without a host key has no neighbors";
}

TEST(MemoryGroups, OmitAHostIfOneOfItsRanksCannotShare) {
  std::vector<AddressRecord> records = OnHosts({"a", "b", "a", "b", "a"});
  records[4].shared_memory = false;
  EXPECT_EQ(MemoryGroups(records), (Groups{{0}, {1, 3}, {2}, {4}}));
  records[1].arena_region_bytes = 8192;
  EXPECT_EQ(MemoryGroups(records), (Groups{{0}, {1}, {2}, {3}, {4}}));
}

TEST(MemoryGroups, AreEqualOnAllRanksEvenIfAHostFailsToShare) {
  const auto place = [](MeshOptions* options) {
    options->host_key = options->rank % 2 == 0 ? "even" : "odd";
    if (options->rank == 4) options->shared_memory = false;
  };
  for (const Mesh& mesh : Connect(5, place)) {
    EXPECT_EQ(mesh.memory_groups, (Groups{{0}, {1, 3}, {2}, {4}}));
    EXPECT_EQ(mesh.arena != nullptr, mesh.transport->rank() % 2 == 1);
  }
}

}  // namespace
}  // namespace sparkhvd
