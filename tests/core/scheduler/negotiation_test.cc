// Tests negotiation between ranks that share memory, and over links.
#include "scheduler/negotiation.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/thorough.h"
#include "scheduler/negotiation_tree.h"
#include "scheduler/rank.h"
#include "transport/mesh.h"

namespace sparkhvd {
namespace {

Request Named(const std::string& name, int64_t length = 4) {
  Request request;
  request.name = name;
  request.shape = {length};
  return request;
}

struct Member {
  int rank;
  ArenaSteps& steps;
  Negotiation& negotiation;

  Outcome Meet(const std::vector<Request>& submitted) {
    std::vector<const Request*> pointers;
    for (const Request& request : submitted) pointers.push_back(&request);
    const Bytes room = negotiation.Announce(negotiation.Report(pointers));
    if (room.size() > 0) room.data()[0] = static_cast<std::byte>(rank + 1);
    EXPECT_TRUE(negotiation.Enter().ok());
    return Conclude();
  }
  Outcome Conclude() {
    Result<Outcome> outcome = negotiation.Conclude(Patience());
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    return outcome.ok() ? outcome.value() : Outcome{};
  }
  std::vector<std::string> Names(const Outcome& outcome) {
    std::vector<std::string> names;
    for (const uint32_t id : outcome.response.cached) {
      names.push_back(negotiation.cache().Own(id).name);
    }
    for (const Agreement& agreement : outcome.response.agreements) names.push_back(agreement.name);
    return names;
  }
};

void OnEveryMember(int count, const std::function<void(Member&)>& body) {
  std::vector<Mesh> meshes = InProcessMeshes(OneHost(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      ArenaSteps steps(*meshes[static_cast<size_t>(rank)].arena);
      const auto negotiation = MakeArenaNegotiation(steps, 1024, 30);
      Member member{rank, steps, *negotiation};
      body(member);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ArenaNegotiation, AllRanksDecideAlikeWithoutACoordinator) {
  OnEveryMember(3, [](Member& self) {
    const std::string own = "only/" + std::to_string(self.rank);
    EXPECT_EQ(self.Names(self.Meet({Named("a"), Named(own)})), std::vector<std::string>{"a"});
    EXPECT_EQ(self.Names(self.Meet({Named("b")})), std::vector<std::string>{"b"});
    const Outcome late = self.Meet({Named("only/0"), Named("only/1"), Named("only/2")});
    EXPECT_EQ(late.response.agreements.size(), 3u);
    EXPECT_FALSE(late.deposits);
  });
}

TEST(ArenaNegotiation, DataDepositedWithEqualMessagesReachesAllMembers) {
  OnEveryMember(4, [](Member& self) {
    EXPECT_FALSE(self.Meet({Named("a")}).deposits) << "requested in full";
    self.negotiation.Remember(Named("a"), {});
    EXPECT_FALSE(self.Meet({Named("a")}).deposits) << "stored once the name recurs";
    self.negotiation.Remember(Named("a"), {});
    for (int round = 0; round < 10; ++round) {
      const Outcome outcome = self.Meet({Named("a")});
      EXPECT_EQ(self.Names(outcome), std::vector<std::string>{"a"});
      ASSERT_TRUE(outcome.deposits);
      for (int member = 0; member < 4; ++member) {
        EXPECT_EQ(outcome.deposits->Slot(member)[0], static_cast<std::byte>(member + 1));
      }
    }
    const Outcome crossed =
        self.Meet(self.rank == 0 ? std::vector<Request>{} : std::vector<Request>{Named("a")});
    EXPECT_FALSE(crossed.deposits);
    EXPECT_TRUE(self.Names(crossed).empty());
    const Outcome caught_up =
        self.Meet(self.rank == 0 ? std::vector<Request>{Named("a")} : std::vector<Request>{});
    EXPECT_EQ(self.Names(caught_up), std::vector<std::string>{"a"});
  });
}

TEST(ArenaNegotiation, MessagesMayBeLongerThanASlot) {
  OnEveryMember(3, [](Member& self) {
    // Member 1 has by far the longest message. The message of member 2 fits into the first frame.
    const size_t count = self.rank == 1 ? 3000 : self.rank == 0 ? 500 : 1;
    std::vector<Request> requests;
    for (size_t i = 0; i < count; ++i) requests.push_back(Named("tensor/" + std::to_string(i)));
    EXPECT_EQ(self.Names(self.Meet(requests)), std::vector<std::string>{"tensor/0"});
    EXPECT_EQ(self.Names(self.Meet({Named("after")})), std::vector<std::string>{"after"});
  });
}

TEST(ArenaNegotiation, AnInterruptedWaitResumes) {
  Gate gate(2);
  OnEveryMember(2, [&gate](Member& self) {
    if (self.rank == 0) {
      self.negotiation.Announce(self.negotiation.Report({}));
      EXPECT_TRUE(self.negotiation.Enter().ok());
      for (int attempt = 0; attempt < 3; ++attempt) {
        const auto early = self.negotiation.Conclude(Deadline::AfterSeconds(0.01));
        ExpectFailure(early.status(), StatusCode::kTimeout, {"rank 1"});
      }
      gate.Meet();
      EXPECT_TRUE(self.Names(self.Conclude()).empty());
    } else {
      gate.Meet();
      EXPECT_TRUE(self.Names(self.Meet({Named("mine")})).empty());
    }
    const std::vector<Request> rest =
        self.rank == 0 ? std::vector<Request>{Named("mine")} : std::vector<Request>{};
    EXPECT_EQ(self.Names(self.Meet(rest)), std::vector<std::string>{"mine"});
  });
}

TEST(PlaceInTree, EveryRankHasOneWayToRank0AndTheRanksBelowFollowIt) {
  for (const int fan_in : {2, 3, 16}) {
    for (const int size : {1, 2, 3, 15, 16, 17, 18, 64, 255, 257, 1000}) {
      std::vector<int> reached(static_cast<size_t>(size));
      for (int rank = 0; rank < size; ++rank) {
        const PlaceInTree place(rank, size, fan_in);
        int next = rank + 1;
        for (const auto& [child, end] : place.children) {
          EXPECT_EQ(child, next) << rank << " of " << size;
          next = end;
          ++reached[static_cast<size_t>(child)];
          const PlaceInTree below(child, size, fan_in);
          EXPECT_EQ(below.parent, rank);
          EXPECT_LT(below.height, place.height);
          EXPECT_EQ(below.children.empty() ? child + 1 : below.children.back().end, end);
        }
        if (rank == 0) {
          EXPECT_EQ(next, size);
        }
      }
      EXPECT_EQ(reached[0], 0);
      for (int rank = 1; rank < size; ++rank) EXPECT_EQ(reached[static_cast<size_t>(rank)], 1);
    }
  }
}

// The agreements of ranks that submit randomly drawn operations in every cycle. One operation may
// differ between the ranks, and one has different rows on every rank.
class Play {
 public:
  Play(int size, int fan_in, unsigned seed) : size_(size), fan_in_(fan_in), seed_(seed) {}

  // Returns the decisions of every rank, a line per cycle.
  std::vector<std::string> Run() {
    std::vector<Mesh> meshes = InProcessMeshes(OwnHosts());
    std::vector<std::string> decisions(static_cast<size_t>(size_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back([&, rank] {
        const auto index = static_cast<size_t>(rank);
        const auto negotiation =
            MakeCoordinatedNegotiation(*meshes[index].transport, 8, 30, fan_in_);
        decisions[index] = RunRank(rank, *negotiation);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return decisions;
  }

 private:
  static constexpr int kCycles = 60;
  static constexpr int kNames = 12;  // more than the cache holds

  std::vector<int> OwnHosts() const {
    std::vector<int> hosts;
    for (int rank = 0; rank < size_; ++rank) hosts.push_back(rank);
    return hosts;
  }

  std::string RunRank(int rank, Negotiation& negotiation) const {
    std::mt19937 random(seed_ * 1000 + static_cast<unsigned>(rank));
    std::map<std::string, Request> pending;
    std::string lines;
    for (int cycle = 0; cycle < kCycles; ++cycle) {
      std::vector<Request> submitted;
      for (int number = 0; number < kNames; ++number) {
        Request request = Named("name " + std::to_string(number), number);
        if (number == 0) request.shape = {static_cast<int64_t>(random() % 20 == 0 ? 1 : 0)};
        if (number == 1) request.kind = OperationKind::kAllgather;
        if (number == 1) request.shape = {static_cast<int64_t>(random() % 3), 2};
        if (pending.count(request.name) > 0 || random() % 2 == 0) continue;
        pending[request.name] = request;
        submitted.push_back(request);
      }
      std::vector<const Request*> pointers;
      for (const Request& request : submitted) pointers.push_back(&request);
      negotiation.Announce(negotiation.Report(pointers));
      EXPECT_TRUE(negotiation.Enter().ok());
      const Result<Outcome> outcome = negotiation.Conclude(Patience());
      EXPECT_TRUE(outcome.ok()) << outcome.status().message();
      if (!outcome.ok()) return lines;
      for (const uint32_t id : outcome.value().response.cached) {
        const std::string& name = negotiation.cache().Own(id).name;
        lines += name + ", ";
        negotiation.cache().Touch(id);
        pending.erase(name);
      }
      for (const Agreement& agreement : outcome.value().response.agreements) {
        lines += agreement.name + ": " + agreement.message;
        for (const int64_t row : agreement.rows) lines += " " + std::to_string(row);
        lines += ", ";
        const Request own = pending.at(agreement.name);
        pending.erase(agreement.name);
        if (agreement.code == StatusCode::kOk) negotiation.Remember(own, agreement.rows);
      }
      lines += "\n";
    }
    return lines;
  }

  const int size_;
  const int fan_in_;
  const unsigned seed_;
};

TEST(CoordinatedNegotiation, RanksAgreeOnTheSameOperationsOverEveryTree) {
  for (const int size : {2, 5, 18, 33}) {
    if (size > 18 && !Thorough()) return;
    const std::vector<std::string> expected = Play(size, size, 1).Run();  // all report to rank 0
    EXPECT_NE(expected[0].find("name 3, "), std::string::npos) << "no operation was cached";
    for (const int fan_in : {2, 3, 16}) {
      for (const std::string& decisions : Play(size, fan_in, 1).Run()) {
        EXPECT_EQ(decisions, expected[0]) << size << " ranks, fan-in " << fan_in;
      }
    }
  }
}

TEST(CoordinatedNegotiation, TheRankAboveAMissingRankNamesIt) {
  constexpr int kRanks = 9;
  constexpr int kMissing = 7;
  std::vector<Mesh> meshes = InProcessMeshes({0, 1, 2, 3, 4, 5, 6, 7, 8});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kMissing) continue;
    threads.emplace_back([&, rank] {
      const auto negotiation =
          MakeCoordinatedNegotiation(*meshes[static_cast<size_t>(rank)].transport, 8, 0.5, 2);
      negotiation->Announce(negotiation->Report({}));
      EXPECT_TRUE(negotiation->Enter().ok());
      const auto outcome = negotiation->Conclude(Deadline::AfterSeconds(0.5));
      const bool above = rank == PlaceInTree(kMissing, kRanks, 2).parent;
      ExpectFailure(outcome.status(), StatusCode::kTimeout,
                    {above ? "waiting for the other ranks' requests" : "waiting for",
                     above ? "receive from rank 7" : "receive from rank"});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace sparkhvd
