// Starts jobs with the real code over a rendezvous server in virtual time, and compares the times
// and messages with closed forms.
#include "simulation/virtual_store.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/deadlines.h"
#include "transport/meeting.h"

namespace sparkhvd {
namespace {

TEST(VirtualStore, ASetCostsBothProcessorsTheLatencyAndTheBytesOfBothDirections) {
  const NetworkCosts costs;
  VirtualStore store(1, costs);
  double connected = 0;
  store.OnEveryRank([&](int, KeyValueStore& client) {
    connected = store.rank(0).now;
    EXPECT_TRUE(client.Set("key", std::string(1000, 'v'), Late()).ok());
  });
  const double message = costs.latency + 2 * costs.per_message;
  EXPECT_NEAR(connected, 2 * costs.latency + 4 * message + (48 + 40 + 32 + 32) * costs.per_byte,
              1e-12);
  EXPECT_NEAR(store.Latest() - connected, 2 * message + (40 + 8 + 3 + 1000 + 40) * costs.per_byte,
              1e-12);
  EXPECT_EQ(store.server().messages, 3u);
}

TEST(VirtualStore, AllRanksGetAllValuesOnceTheLastIsSet) {
  const NetworkCosts costs;
  constexpr int kRanks = 40;
  VirtualStore store(kRanks, costs);
  store.OnEveryRank([](int rank, KeyValueStore& client) {
    Meeting meeting(client, "mesh", rank, Late(), {});
    EXPECT_TRUE(meeting.Join().ok());
    EXPECT_TRUE(meeting.Set("address/" + std::to_string(rank), std::to_string(rank)).ok());
    const auto values = meeting.GetAll("address", {0, kRanks});
    ASSERT_TRUE(values.ok()) << values.status().message();
    for (int other = 0; other < kRanks; ++other) {
      EXPECT_EQ(values.value()[static_cast<size_t>(other)], std::to_string(other));
    }
    meeting.Leave();
  });
  constexpr size_t kMessages = 2 + 4;  // a connection and four requests
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(store.rank(rank).messages, kMessages);
  EXPECT_EQ(store.server().messages, kRanks * kMessages);
  // The server receives and sends as many messages, one after the other.
  const double processor = 2 * kRanks * kMessages * costs.per_message;
  EXPECT_GE(store.Latest(), processor);
  EXPECT_LE(store.Latest(),
            processor + static_cast<double>(kMessages) * 3 * (costs.latency + costs.per_message) +
                static_cast<double>(store.server().bytes) * costs.per_byte);
}

TEST(VirtualStore, AWaitForAKeyThatNoRankWillSetFails) {
  VirtualStore store(2, NetworkCosts{});
  store.OnEveryRank([](int rank, KeyValueStore& client) {
    if (rank == 0) return;
    EXPECT_EQ(client.Get("key", Late()).status().message(), "no rank is left to set 'key'");
  });
}

}  // namespace
}  // namespace sparkhvd
