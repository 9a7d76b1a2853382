#include "scheduler/cycle.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "scheduler/scripted_cycle.h"

namespace sparkhvd {
namespace {

using std::chrono::microseconds;

Deadline AtOnce() { return Deadline::AfterSeconds(0); }

TEST(Cycle, RunsOperationsThatAllRanksHaveSubmitted) {
  ScriptedCycle self;
  EXPECT_EQ(self.cycle.state(), Cycle::State::kIdle);
  EXPECT_FALSE(self.cycle.due()) << "an idle engine needs no cycle";
  self.OthersAgree();
  for (const int round : {1, 2, 3}) {  // the third one by its id in the cache
    const Pointer operation = self.Submit("a");
    EXPECT_TRUE(self.cycle.Run(Patience()).ok());
    EXPECT_TRUE(operation->done());
    EXPECT_TRUE(operation->outcome().ok()) << operation->outcome().message();
    EXPECT_EQ(self.cycle.state(), Cycle::State::kIdle);
    EXPECT_TRUE(self.cycle.made_progress());
    EXPECT_EQ(self.counters.operations.load(), static_cast<uint64_t>(round));
    EXPECT_EQ(self.counters.cache_hits.load(), round == 3 ? 1u : 0u);
  }
}

TEST(Cycle, APauseGrowsUntilOtherRanksAct) {
  ScriptedCycle self;
  const Pointer operation = self.Submit("a");
  const RequestMessage all = [&] {
    self.OthersHaveNotSubmitted();
    EXPECT_TRUE(self.cycle.Run(Patience()).ok());
    return self.negotiation.announced;
  }();
  EXPECT_EQ(self.cycle.state(), Cycle::State::kPending);
  EXPECT_EQ(self.cycle.pause(), microseconds(0)) << "a submission is progress";
  EXPECT_TRUE(self.cycle.due().has_value());
  microseconds expected{50};
  for (int idle = 0; idle < 10; ++idle) {
    EXPECT_TRUE(self.cycle.Run(Patience()).ok());
    EXPECT_TRUE(self.negotiation.announced.requests.empty()) << "reported once";
    EXPECT_EQ(self.cycle.pause(), std::min(expected, microseconds(5000)));
    EXPECT_FALSE(self.cycle.made_progress());
    expected *= 2;
  }
  self.negotiation.conclude = [&all](Deadline) { return AgreeOn(all); };
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  EXPECT_TRUE(operation->done());
  EXPECT_EQ(self.cycle.pause(), microseconds(0));
  EXPECT_EQ(self.cycle.state(), Cycle::State::kIdle);
}

TEST(Cycle, StaysEnteredWhenThePatienceEndsAndContinuesInTheNextRun) {
  ScriptedCycle self;
  const Pointer first = self.Submit("first");
  self.OthersAreLate();
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_TRUE(self.cycle.Run(AtOnce()).ok());
    EXPECT_EQ(self.cycle.state(), Cycle::State::kEntered);
    EXPECT_EQ(self.cycle.due(), SubmissionQueue::kAtOnce);
    EXPECT_FALSE(self.cycle.made_progress());
  }
  const Pointer second = self.Submit("second");
  self.OthersAgree();
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  EXPECT_EQ(self.negotiation.entered, 1) << "a cycle is entered once";
  EXPECT_TRUE(first->done());
  EXPECT_FALSE(second->done()) << "submitted after the cycle was entered";
  EXPECT_EQ(self.cycle.state(), Cycle::State::kIdle);
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  EXPECT_TRUE(second->done());
}

TEST(Cycle, FailsAtItsOwnDeadlineAndNamesThePendingOperations) {
  ScriptedCycle self(0);
  const Pointer operation = self.Submit("a");
  self.OthersAreLate();
  ExpectFailure(self.cycle.Run(AtOnce()), StatusCode::kTimeout,
                {"pending here (allreduce 'a')", "rank 7 is missing"});
  EXPECT_EQ(self.cycle.state(), Cycle::State::kFailed);
  EXPECT_FALSE(self.cycle.due());
  EXPECT_FALSE(operation->done()) << "the end of the engine gives it its outcome";
}

TEST(Cycle, NoCycleFollowsAFailedOne) {
  for (const bool while_entering : {true, false}) {
    ScriptedCycle self;
    const Status lost(StatusCode::kPeerLost, "rank 1 has left");
    self.OthersAgree();
    if (while_entering) {
      self.negotiation.enter = lost;
    } else {
      self.negotiation.conclude = [&lost](Deadline) -> Result<Outcome> { return lost; };
    }
    static_cast<void>(self.Submit("a"));
    ExpectFailure(self.cycle.Run(Patience()), StatusCode::kPeerLost, {"rank 1 has left"});
    EXPECT_EQ(self.cycle.state(), Cycle::State::kFailed);
    self.negotiation.enter = Status();
    self.OthersAgree();
    ExpectFailure(self.cycle.Run(Patience()), StatusCode::kInternal,
                  {"no cycle can follow a failed one"});
    EXPECT_EQ(self.cycle.state(), Cycle::State::kFailed);
    EXPECT_EQ(self.negotiation.entered, 1);
  }
}

TEST(Cycle, AnExceptionIsAFailure) {
  ScriptedCycle self;
  static_cast<void>(self.Submit("a"));
  self.negotiation.conclude = [](Deadline) -> Result<Outcome> { throw std::bad_alloc(); };
  ExpectFailure(self.cycle.Run(Patience()), StatusCode::kIo, {"memory"});
  EXPECT_EQ(self.cycle.state(), Cycle::State::kFailed);
}

TEST(Cycle, FailsWhenTheRanksAgreeOnAnOperationThatIsNotPendingHere) {
  for (const bool cached : {true, false}) {
    ScriptedCycle self;
    static_cast<void>(self.Submit("a"));
    self.negotiation.conclude = [cached](Deadline) -> Result<Outcome> {
      Outcome outcome;
      if (cached) outcome.response.cached = {3};
      if (!cached) outcome.response.agreements = {Agreement{"unknown", {}, {}, {}, {}}};
      return outcome;
    };
    ExpectFailure(self.cycle.Run(Patience()), StatusCode::kInternal,
                  {cached ? "operation 3" : "operation 'unknown'", "not pending here"});
    EXPECT_EQ(self.cycle.state(), Cycle::State::kFailed);
  }
}

TEST(Cycle, ARefusedOperationFailsAloneAndItsNameIsFree) {
  ScriptedCycle self;
  const Pointer operation = self.Submit("a");
  self.negotiation.conclude = [](Deadline) -> Result<Outcome> {
    Outcome outcome;
    outcome.response.agreements = {Agreement{"a", StatusCode::kMismatch, "shapes differ", {}, {}}};
    return outcome;
  };
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  ExpectFailure(operation->outcome(), StatusCode::kMismatch, {"allreduce 'a'", "shapes differ"});
  EXPECT_EQ(self.cycle.state(), Cycle::State::kIdle);
  EXPECT_FALSE(self.queue.HasInFlight());
  self.OthersAgree();
  const Pointer again = self.Submit("a");
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  EXPECT_TRUE(again->outcome().ok());
}

TEST(Cycle, AppliesTheSettingsOfRankZero) {
  ScriptedCycle self;
  EXPECT_TRUE(self.cycle.tuning().last);
  Retuning retuning;
  retuning.tunables.fusion_threshold = 12345;
  self.negotiation.conclude = [&retuning](Deadline) -> Result<Outcome> {
    Outcome outcome;
    outcome.response.retuning = retuning;
    return outcome;
  };
  EXPECT_TRUE(self.cycle.Run(Patience()).ok());
  EXPECT_EQ(self.cycle.tuning().tunables.fusion_threshold, 12345u);
  EXPECT_EQ(self.execution.tunables().fusion_threshold, 12345u);
  EXPECT_FALSE(self.cycle.tuning().last);
}

}  // namespace
}  // namespace sparkhvd
