#include "scheduler/cycle_driver.h"

#include <gtest/gtest.h>

#include "base/spin.h"
#include "scheduler/scripted_cycle.h"

namespace sparkhvd {
namespace {

struct Driven : ScriptedCycle {
  ~Driven() { static_cast<void>(lifecycle.Shutdown(Patience())); }
  void StartThread() {
    lifecycle.Start({}, [this] { driver.RunUntilEnd(); });
  }
  CycleDriver driver{{queue, lifecycle, cycle, dispatcher}, true};
};

TEST(CycleDriver, AWaitingThreadDrivesUntilItsOperationIsDone) {
  Driven self;
  self.OthersAgree();
  const Pointer operation = self.Submit("a");
  self.driver.DriveUntilDone(*operation, Patience());
  EXPECT_TRUE(operation->done());
  EXPECT_EQ(self.negotiation.entered, 1);
  self.driver.DriveUntilDone(*operation, Patience());
  EXPECT_EQ(self.negotiation.entered, 1) << "nothing is left to do";
  EXPECT_TRUE(self.queue.TryTurn()) << "the turn is free";
}

TEST(CycleDriver, AWaitingThreadLeavesTheCycleToTheThreadThatDrives) {
  Driven self;
  self.OthersAgree();
  const Pointer operation = self.Submit("a");
  ASSERT_TRUE(self.queue.TryTurn());
  self.driver.DriveUntilDone(*operation, Patience());
  EXPECT_EQ(self.negotiation.entered, 0);
  EXPECT_FALSE(operation->done());
  self.queue.EndTurn({});
}

TEST(CycleDriver, AWaitingThreadStopsWhenOtherRanksMustActFirst) {
  Driven self;
  self.OthersHaveNotSubmitted();
  const Pointer operation = self.Submit("a");
  self.driver.DriveUntilDone(*operation, Patience());
  EXPECT_FALSE(operation->done());
  EXPECT_EQ(self.negotiation.entered, 2) << "the second cycle made no progress";
  EXPECT_EQ(self.queue.AwaitTurn(), SubmissionQueue::Turn::kDue) << "the engine's thread continues";
  self.queue.EndTurn({});
}

TEST(CycleDriver, TheEnginesThreadConcludesTheCycleOfAWaiterThatLeaves) {
  Driven self;
  self.OthersAreLate();
  const Pointer operation = self.Submit("a");
  self.driver.DriveUntilDone(*operation, Deadline::AfterSeconds(0));
  EXPECT_EQ(self.cycle.state(), Cycle::State::kEntered);
  self.OthersAgree();
  self.StartThread();
  EXPECT_TRUE(operation->Wait(Patience()).ok());
}

TEST(CycleDriver, TheEnginesThreadRunsOperationsWithoutAWaiter) {
  Driven self;
  self.OthersAgree();
  self.StartThread();
  for (int round = 0; round < 100; ++round) {
    EXPECT_TRUE(self.Submit("a", Start::kNow)->Wait(Patience()).ok());
  }
}

TEST(CycleDriver, ThreadsSpinLongWhileTheProgramWaits) {
  Driven self;
  std::atomic<std::chrono::microseconds> spin{};
  self.negotiation.conclude = [&](Deadline) {
    spin = SpinsLong::Time();
    return AgreeOn(self.negotiation.announced);
  };
  EXPECT_TRUE(self.driver.Await(*self.Submit("a"), Patience()).ok());
  EXPECT_EQ(spin.load(), kLongSpin) << "the program's thread drives";
  EXPECT_EQ(SpinsLong::Time(), kShortSpin) << "after the wait";

  self.StartThread();
  EXPECT_TRUE(self.Submit("b", Start::kNow)->Wait(Patience()).ok());
  EXPECT_EQ(spin.load(), kShortSpin) << "the engine's thread drives, and nobody waits";

  while (!self.queue.TryTurn()) std::this_thread::yield();  // so that the waiter cannot drive
  const Pointer awaited = self.Submit("c", Start::kNow);
  std::thread waiter([&] { EXPECT_TRUE(self.driver.Await(*awaited, Patience()).ok()); });
  while (!self.driver.has_waiters()) std::this_thread::yield();
  self.queue.EndTurn({});
  waiter.join();
  EXPECT_EQ(spin.load(), kLongSpin) << "the engine's thread drives for a waiter";
}

TEST(CycleDriver, ThreadsThatDriveInTurnsFinishEveryOperation) {
  Driven self;
  self.OthersAgree();
  self.StartThread();
  std::vector<std::thread> threads;
  for (const char* name : {"a", "b", "c"}) {
    threads.emplace_back([&self, name] {
      for (int round = 0; round < 200; ++round) {
        const Pointer operation =
            self.Submit(name, round % 3 == 0 ? Start::kNow : Start::kWithWaiter);
        self.driver.DriveUntilDone(*operation, Patience());
        EXPECT_TRUE(operation->Wait(Patience()).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(self.counters.operations.load(), 600u);
}

TEST(CycleDriver, AFailedCycleEndsTheEngineAndEveryOperation) {
  for (const bool waiter : {true, false}) {
    Driven self;
    self.negotiation.conclude = [](Deadline) -> Result<Outcome> {
      return Status(StatusCode::kPeerLost, "rank 1 has left");
    };
    const Pointer one = self.Submit("one");
    const Pointer two = self.Submit("two");
    if (waiter) {
      self.driver.DriveUntilDone(*one, Patience());
      EXPECT_TRUE(self.queue.closed());
      EXPECT_FALSE(one->done()) << "the engine's thread completes it";
    }
    self.StartThread();
    for (const Pointer& operation : {one, two}) {
      ExpectFailure(operation->Wait(Patience()), StatusCode::kPeerLost, {"rank 1 has left"});
    }
    EXPECT_TRUE(self.lifecycle.Shutdown(Patience()).ok());
    ExpectFailure(self.lifecycle.Failure(), StatusCode::kPeerLost, {"rank 1 has left"});
    EXPECT_EQ(self.negotiation.entered, 1);
    EXPECT_GE(self.aborts, 1);
  }
}

TEST(CycleDriver, AnEndGivesEveryOperationTheReason) {
  Driven self;
  self.OthersHaveNotSubmitted();
  self.StartThread();
  const Pointer operation = self.Submit("a", Start::kNow);
  self.lifecycle.Abort("the user aborted");
  ExpectFailure(operation->Wait(Patience()), StatusCode::kAborted,
                {"allreduce 'a'", "the user aborted"});
}

}  // namespace
}  // namespace sparkhvd
