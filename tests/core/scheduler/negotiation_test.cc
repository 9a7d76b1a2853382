// Tests negotiation between ranks that share memory.
#include "scheduler/negotiation.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

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
    EXPECT_FALSE(late.beside);
  });
}

TEST(ArenaNegotiation, DataBesideEqualMessagesIsExchangedWithThem) {
  OnEveryMember(4, [](Member& self) {
    EXPECT_FALSE(self.Meet({Named("a")}).beside) << "asked for in full";
    self.negotiation.Remember(Named("a"), {});
    for (int round = 0; round < 10; ++round) {
      const Outcome outcome = self.Meet({Named("a")});
      EXPECT_EQ(self.Names(outcome), std::vector<std::string>{"a"});
      ASSERT_TRUE(outcome.beside);
      for (int member = 0; member < 4; ++member) {
        EXPECT_EQ(outcome.beside->Slot(member)[0], static_cast<std::byte>(member + 1));
      }
    }
    const Outcome crossed =
        self.Meet(self.rank == 0 ? std::vector<Request>{} : std::vector<Request>{Named("a")});
    EXPECT_FALSE(crossed.beside);
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

}  // namespace
}  // namespace sparkhvd
