// Tests the model of the network, and compares the algorithms' times in it with closed forms.
#include "simulation/virtual_network.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <vector>

#include "base/thorough.h"
#include "collectives/allgather.h"
#include "collectives/allreduce_links.h"
#include "collectives/alltoall.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/participants.h"
#include "collectives/reducescatter.h"
#include "collectives/select.h"
#include "scheduler/negotiation.h"

namespace sparkhvd {
namespace {

Deadline Patience() { return Deadline::AfterSeconds(60); }

std::vector<int> OwnHosts(int size) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size; ++rank) hosts.push_back(rank);
  return hosts;
}

using Allreduce = Status (*)(Transport&, const Reduction&, int, std::byte*, size_t,
                             std::vector<std::byte>&, Deadline);

// Returns the virtual seconds of an allreduce of `count` floats, each of which counts as `scale`.
double TimeOf(Allreduce allreduce, int size, size_t count, const NetworkCosts& costs,
              double scale = 1) {
  VirtualNetwork network(OwnHosts(size), costs, scale);
  network.OnEveryRank([&](Transport& transport) {
    std::vector<float> data(count, 1.0f);
    std::vector<std::byte> scratch;
    const Status status =
        allreduce(transport, Reduction{}, size, reinterpret_cast<std::byte*>(data.data()), count,
                  scratch, Patience());
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(data, std::vector<float>(count, static_cast<float>(size)));
  });
  return network.Latest();
}

TEST(VirtualNetwork, AMessageCostsItsLatencyItsBytesAndBothProcessors) {
  NetworkCosts costs;
  VirtualNetwork network({0, 1, 1}, costs);
  network.OnEveryRank([](Transport& transport) {
    std::vector<std::byte> data(1000);
    const bool sends = transport.rank() == 1;
    for (const int peer : {0, 2}) {
      if (!sends && peer != transport.rank()) continue;
      const auto ticket = sends ? transport.PostSend(peer, ConstBytes(data.data(), data.size()))
                                : transport.PostReceive(1, Bytes(data.data(), data.size()));
      const Status status = transport.Wait(Span<const Ticket>(&ticket.value(), 1), Patience());
      EXPECT_TRUE(status.ok()) << status.message();
    }
  });
  const double first = costs.per_message + 1000 * costs.per_byte;
  EXPECT_DOUBLE_EQ(network.rank(0).now, first + costs.latency + costs.per_message);
  EXPECT_DOUBLE_EQ(network.rank(1).now, 2 * costs.per_message);
  EXPECT_DOUBLE_EQ(network.rank(2).now, std::max(first, 2 * costs.per_message) +
                                            1000 * costs.per_byte_in_host + costs.latency_in_host +
                                            costs.per_message);
  EXPECT_EQ(network.rank(1).messages, 2u);
  EXPECT_EQ(network.rank(1).bytes, 2000u);
}

TEST(VirtualNetwork, AlgorithmsTakeTheTimesOfTheirClosedForms) {
  NetworkCosts costs;
  const double message = costs.latency + 2 * costs.per_message;
  for (const int size : {2, 4, 8, 32}) {
    const size_t count = 1 << 12;
    const double bytes = 4.0 * static_cast<double>(count);
    int rounds = 0;
    while (1 << rounds < size) ++rounds;
    EXPECT_NEAR(TimeOf(AllreduceDoublingInPlace, size, count, costs),
                rounds * (message + bytes * costs.per_byte), 1e-9);
    EXPECT_NEAR(TimeOf(AllreduceHalvingInPlace, size, count, costs),
                2 * rounds * message + 2 * (1.0 - 1.0 / size) * bytes * costs.per_byte, 1e-9);
    const double steps = 2.0 * (size - 1);
    EXPECT_NEAR(TimeOf(AllreduceRingInPlace, size, count, costs),
                steps * (message + bytes / size * costs.per_byte), 1e-9);
  }
  VirtualNetwork network(OwnHosts(13), costs);
  network.OnEveryRank(
      [](Transport& transport) { EXPECT_TRUE(Barrier(transport, Patience()).ok()); });
  EXPECT_NEAR(network.Latest(), 4 * (message + costs.per_byte), 1e-9);
}

// The choice also counts the time to combine, which the network lacks.
TEST(VirtualNetwork, TheChosenAllreduceTakesHardlyLongerThanTheFastest) {
  if (!Thorough()) GTEST_SKIP() << "the algorithms of the test above with other values";
  constexpr double kCombiningSecondsPerByte = 0.1e-9;
  const auto allreduce = [](LinkAlgorithm algorithm) {
    return algorithm == LinkAlgorithm::kRing       ? AllreduceRingInPlace
           : algorithm == LinkAlgorithm::kDoubling ? AllreduceDoublingInPlace
                                                   : AllreduceHalvingInPlace;
  };
  for (const double lanes : {1.0, 8.0}) {
    LinkCosts links;
    links.per_byte *= lanes;
    NetworkCosts costs;
    costs.latency = links.per_message - 2 * costs.per_message;
    costs.per_byte = links.per_byte;
    for (const int size : {2, 3, 4, 5, 8, 12, 16, 17, 24, 64}) {
      // Slices of equal numbers of cache lines; `scale` accounts for the real size.
      const int lines = std::lcm(size, Participants(size).count);
      const size_t count = static_cast<size_t>(lines) * kCacheLine / sizeof(float);
      for (const size_t bytes :
           {4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20}) {
        const double own = static_cast<double>(bytes) / lanes;
        const double scale = own / static_cast<double>(count * sizeof(float));
        std::map<LinkAlgorithm, double> times;
        for (const auto algorithm :
             {LinkAlgorithm::kRing, LinkAlgorithm::kDoubling, LinkAlgorithm::kHalving}) {
          times[algorithm] = TimeOf(allreduce(algorithm), size, count, costs, scale);
        }
        double least = times.begin()->second;
        for (const auto& [algorithm, seconds] : times) least = std::min(least, seconds);
        const auto chosen = SelectForLinks(size, static_cast<size_t>(own), links);
        EXPECT_LE(times[chosen], 1.08 * least + own * kCombiningSecondsPerByte)
            << size << " hosts, " << lanes << " lanes, " << bytes << " bytes";
      }
    }
  }
}

// Ranks beyond a power of two add a message before the rounds and one after them.
TEST(VirtualNetwork, AReducescatterByHalvingTakesOneRoundPerDoublingOfTheRanks) {
  const NetworkCosts costs;
  const double message = costs.latency + 2 * costs.per_message;
  for (const int size : {2, 4, 8, 32, 3, 7, 9, 33}) {
    const size_t count = 288 * static_cast<size_t>(size);
    const auto bytes = static_cast<double>(count * sizeof(float));
    const std::vector<Slice> slices = EvenSlices(count, size);
    VirtualNetwork network(OwnHosts(size), costs);
    network.OnEveryRank([&](Transport& transport) {
      const std::vector<float> source(count, 1.0f);
      std::vector<float> target(count / static_cast<size_t>(size));
      std::vector<std::byte> scratch;
      const Status status = ReducescatterHalving(
          transport, Reduction{}, reinterpret_cast<const std::byte*>(source.data()),
          reinterpret_cast<std::byte*>(target.data()), slices, scratch, Patience());
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(target, std::vector<float>(target.size(), static_cast<float>(size)));
    });
    int rounds = 0;
    while (2 << rounds <= size) ++rounds;
    if (1 << rounds == size) {
      EXPECT_NEAR(network.Latest(), rounds * message + (1.0 - 1.0 / size) * bytes * costs.per_byte,
                  1e-9);
    } else {
      ++rounds;  // the messages of a rank after the rounds
      EXPECT_LE(network.Latest(), (rounds + 1) * message + 2.2 * bytes * costs.per_byte);
    }
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_LE(network.rank(rank).messages, static_cast<size_t>(rounds)) << rank << " of " << size;
    }
  }
}

TEST(VirtualNetwork, AGatherByDoublingTakesOneRoundPerDoublingOfTheRanks) {
  const NetworkCosts costs;
  for (const int size : {2, 7, 16, 33}) {
    const auto time = [&](auto gather) {
      VirtualNetwork network(OwnHosts(size), costs);
      network.OnEveryRank([&](Transport& transport) {
        const std::vector<std::byte> own(100);
        std::vector<std::byte> all(100 * static_cast<size_t>(size));
        const Status status = gather(transport, ConstBytes(own.data(), own.size()),
                                     std::vector<size_t>(static_cast<size_t>(size), 100),
                                     Bytes(all.data(), all.size()), Patience());
        EXPECT_TRUE(status.ok()) << status.message();
      });
      return network.Latest();
    };
    int rounds = 0;
    while (1 << rounds < size) ++rounds;
    const double bytes = 100.0 * (size - 1) * costs.per_byte;
    EXPECT_NEAR(time(AllgatherRing), (size - 1) * (costs.latency + 2 * costs.per_message) + bytes,
                1e-9);
    EXPECT_LE(time(AllgatherDoubling),
              rounds * (costs.latency + 4 * costs.per_message) + bytes + 1e-9);
  }
}

// Returns the virtual seconds of a broadcast.
double TimeOf(const BroadcastRoute& route, int size, size_t bytes, const NetworkCosts& costs) {
  VirtualNetwork network(OwnHosts(size), costs);
  network.OnEveryRank([&](Transport& transport) {
    std::vector<std::byte> data(bytes);
    const Status status = BroadcastLinks(transport, route, 0, data.data(),
                                         Bytes(data.data(), data.size()), Patience());
    EXPECT_TRUE(status.ok()) << status.message();
  });
  return network.Latest();
}

TEST(VirtualNetwork, AChainSendsLongDataOncePerRankAndATreeOncePerLevel) {
  const NetworkCosts costs;
  const double message = costs.latency + 2 * costs.per_message;
  constexpr size_t kPiece = size_t{64} << 10;
  constexpr size_t kPieces = 40;
  const double piece = kPiece * costs.per_byte;
  for (const int size : {2, 5, 16}) {
    const double chain = TimeOf({true, kPiece}, size, kPieces * kPiece, costs);
    EXPECT_NEAR(chain, (size - 1) * (message + piece) + (kPieces - 1) * piece, 0.01 * chain);
  }
  const double tree = TimeOf({false, kPiece}, 16, kPieces * kPiece, costs);
  EXPECT_GT(tree, 4 * kPieces * piece);
}

TEST(VirtualNetwork, ABroadcastTakesTheFasterRoute) {
  const NetworkCosts costs;
  for (const int size : {3, 16}) {
    for (const size_t bytes : {size_t{1000}, size_t{2} << 20}) {
      const BroadcastRoute chosen = SelectBroadcast(size, bytes);
      const BroadcastRoute chain{true, size_t{64} << 10};
      EXPECT_EQ(chosen.chain, bytes > 1000) << size << " " << bytes;
      EXPECT_LT(TimeOf(chosen, size, bytes, costs),
                TimeOf(chosen.chain ? BroadcastRoute{} : chain, size, bytes, costs))
          << size << " " << bytes;
    }
  }
}

TEST(VirtualNetwork, ASlowLinkSlowsDownWhatItsRankSendsAndReceives) {
  const NetworkCosts costs;
  constexpr size_t kBytes = 100000;  // more than is buffered
  const double line = kBytes * costs.per_byte;
  for (const int slow : {0, 1}) {
    VirtualNetwork network(OwnHosts(2), costs);
    network.SlowDown(slow, 3);
    network.OnEveryRank([](Transport& transport) {
      std::vector<std::byte> data(kBytes);
      const auto ticket = transport.rank() == 0
                              ? transport.PostSend(1, ConstBytes(data.data(), data.size()))
                              : transport.PostReceive(0, Bytes(data.data(), data.size()));
      EXPECT_TRUE(transport.Wait(Span<const Ticket>(&ticket.value(), 1), Patience()).ok());
    });
    EXPECT_NEAR(network.rank(0).now, costs.per_message + (slow == 0 ? 3 : 1) * line, 1e-12);
    EXPECT_NEAR(network.rank(1).now, 2 * costs.per_message + costs.latency + 3 * line, 1e-12);
  }
}

// Every rank waits for the bytes of the slow one, which sends and receives as many as the others.
TEST(VirtualNetwork, ASlowLinkSlowsDownARingInEveryStep) {
  const NetworkCosts costs;
  constexpr int kSize = 8;
  constexpr size_t kCount = 1 << 12;
  VirtualNetwork network(OwnHosts(kSize), costs);
  network.SlowDown(3, 4);
  network.OnEveryRank([](Transport& transport) {
    std::vector<float> data(kCount, 1.0f);
    std::vector<std::byte> scratch;
    EXPECT_TRUE(AllreduceRingInPlace(transport, Reduction{}, kSize,
                                     reinterpret_cast<std::byte*>(data.data()), kCount, scratch,
                                     Patience())
                    .ok());
  });
  const double message = costs.latency + 2 * costs.per_message;
  const double slow = 4 * 4.0 * kCount / kSize * costs.per_byte;
  EXPECT_NEAR(network.Latest(), 2 * (kSize - 1) * (message + slow), 1e-4);
}

TEST(VirtualNetwork, AnAllreduceEndsAfterItsLastRankHasBegun) {
  const NetworkCosts costs;
  const double alone = TimeOf(AllreduceDoublingInPlace, 8, 16, costs);
  VirtualNetwork network(OwnHosts(8), costs);
  network.OnEveryRank([&](Transport& transport) {
    network.Compute(transport.rank(), transport.rank() == 5 ? 0.25 : 0.125);
    std::vector<float> data(16, 1.0f);
    std::vector<std::byte> scratch;
    EXPECT_TRUE(AllreduceDoublingInPlace(transport, Reduction{}, 8,
                                         reinterpret_cast<std::byte*>(data.data()), data.size(),
                                         scratch, Patience())
                    .ok());
  });
  EXPECT_NEAR(network.Latest(), 0.25 + alone, 1e-9);
}

using Alltoall = std::function<Status(Transport&, const RowsToSend&, const RowsTarget&,
                                      std::vector<std::byte>&)>;

// Runs an alltoall with a row for every rank.
void ExchangeRows(VirtualNetwork& network, size_t row_bytes, const Alltoall& alltoall) {
  network.OnEveryRank([&](Transport& transport) {
    const auto size = static_cast<size_t>(transport.size());
    std::vector<std::byte> data(size * row_bytes);
    std::vector<std::byte> received(size * row_bytes);
    std::vector<std::byte> scratch;
    const std::vector<int64_t> splits(size, 1);
    const auto target = [&](const std::vector<int64_t>&) -> Result<Bytes> {
      return Bytes(received.data(), received.size());
    };
    const RowsToSend rows{ConstBytes(data.data(), data.size()), splits, row_bytes};
    const Status status = alltoall(transport, rows, target, scratch);
    EXPECT_TRUE(status.ok()) << status.message();
  });
}

// All messages are in transit at once, so their latency passes while the processor sends others.
TEST(VirtualNetwork, AnAlltoallOfShortPartsTakesTheProcessorTwoMessagesPerPeer) {
  const NetworkCosts costs;
  constexpr int kSize = 16;
  VirtualNetwork network(OwnHosts(kSize), costs);
  ExchangeRows(network, 100, [](auto& transport, auto& rows, auto& target, auto& scratch) {
    return AlltoallLinks(transport, rows, target, scratch, Patience());
  });
  EXPECT_NEAR(network.Latest(), 2 * (kSize - 1) * costs.per_message, 1e-9);
}

TEST(VirtualNetwork, AnAlltoallOfRelayedPartsTakesOneRoundPerDoublingOfTheRanks) {
  const NetworkCosts costs;
  constexpr size_t kRow = 100;
  for (const int size : {2, 3, 7, 16, 33}) {
    VirtualNetwork network(OwnHosts(size), costs);
    ExchangeRows(network, kRow, [](auto& transport, auto& rows, auto& target, auto& scratch) {
      return AlltoallBruck(transport, rows, target, kRow, scratch, Patience());
    });
    size_t rounds = 0;
    size_t parts = 0;  // that a rank sends in all rounds: half of all if the size is a power of two
    for (int distance = 1; distance < size; distance *= 2) ++rounds;
    for (int step = 1; step < size; ++step) {
      for (int distance = 1; distance < size; distance *= 2) parts += (step & distance) != 0;
    }
    const size_t bytes = parts * (kRow + sizeof(int64_t));
    const double message = costs.latency + 2 * costs.per_message;
    EXPECT_NEAR(network.Latest(),
                static_cast<double>(rounds) * message + static_cast<double>(bytes) * costs.per_byte,
                1e-9);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(network.rank(rank).messages, rounds);
      EXPECT_EQ(network.rank(rank).bytes, bytes);
    }
  }
}

// Their bytes take longer than a message, but not much longer.
TEST(VirtualNetwork, PartsOfAnAlltoallThatAreNotShortAreInTransitTogether) {
  const NetworkCosts costs;
  constexpr int kSize = 16;
  constexpr size_t kRow = 1000;
  VirtualNetwork network(OwnHosts(kSize), costs);
  ExchangeRows(network, kRow, [](auto& transport, auto& rows, auto& target, auto& scratch) {
    return AlltoallBruck(transport, rows, target, 0, scratch, Patience());
  });
  EXPECT_LT(network.Latest(), 5 * (costs.latency + 2 * costs.per_message) +
                                  (kSize - 1) * (2 * costs.per_message + kRow * costs.per_byte));
}

TEST(VirtualNetwork, AByteCountsAsScaleBytes) {
  const NetworkCosts costs;
  EXPECT_NEAR(TimeOf(AllreduceDoublingInPlace, 4, 100, costs, 64),
              TimeOf(AllreduceDoublingInPlace, 4, 6400, costs), 1e-9);
}

TEST(VirtualNetwork, TheTreeOfANegotiationTakesLessThanASingleCoordinator) {
  constexpr int kSize = 256;
  const auto cycle = [](int fan_in) {
    VirtualNetwork network(OwnHosts(kSize), NetworkCosts{});
    network.OnEveryRank([&](Transport& transport) {
      const auto negotiation = MakeCoordinatedNegotiation(transport, 8, 60, fan_in);
      negotiation->Announce(negotiation->Report({}));
      EXPECT_TRUE(negotiation->Enter().ok());
      const auto outcome = negotiation->Conclude(Patience());
      EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    });
    return network.Latest();
  };
  const double star = cycle(kSize);
  EXPECT_GT(star, 2 * (kSize - 1) * NetworkCosts{}.per_message);
  EXPECT_LT(cycle(kFanIn), star / 3);
}

}  // namespace
}  // namespace sparkhvd
