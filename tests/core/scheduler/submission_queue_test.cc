#include "scheduler/submission_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

using Turn = SubmissionQueue::Turn;

Pointer OperationNamed(const std::string& name, OperationKind kind = OperationKind::kBarrier) {
  Request request;
  request.name = name;
  request.kind = kind;
  request.shape = {0};
  return std::make_shared<Operation>(std::move(request), nullptr, nullptr);
}

std::vector<std::string> Names(const std::vector<Pointer>& operations) {
  std::vector<std::string> names;
  for (const Pointer& operation : operations) names.push_back(operation->request().name);
  return names;
}

class Submissions : public ::testing::Test {
 protected:
  Status Push(const std::vector<Pointer>& operations, Start start = Start::kNow) {
    return queue.Push({operations.data(), operations.size()}, start);
  }
  void Release(const Pointer& operation) { queue.Release({&operation, 1}); }

  // Waits for the turn on another thread, like the engine's thread.
  std::future<Turn> AwaitTurn() {
    return std::async(std::launch::async, [this] { return queue.AwaitTurn(); });
  }
  static Turn Get(std::future<Turn>& turn) {
    EXPECT_EQ(turn.wait_until(Patience().at()), std::future_status::ready);
    return turn.get();
  }
  static bool Waits(const std::future<Turn>& turn) {
    return turn.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
  }

  EngineTimeline timeline{nullptr, ""};
  SubmissionQueue queue{true, timeline};
};

TEST_F(Submissions, AreTakenOnceInTheOrderOfTheirPushes) {
  EXPECT_TRUE(Push({OperationNamed("b")}).ok());
  EXPECT_TRUE(Push({OperationNamed("c"), OperationNamed("a")}, Start::kWithWaiter).ok());
  EXPECT_EQ(Names(queue.Take()), (std::vector<std::string>{"b", "c", "a"}));
  EXPECT_TRUE(queue.Take().empty());
}

TEST_F(Submissions, ANameIsInFlightUntilItIsReleased) {
  const Pointer first = OperationNamed("same");
  EXPECT_FALSE(queue.HasInFlight());
  EXPECT_TRUE(Push({first}).ok());
  static_cast<void>(queue.Take());
  EXPECT_TRUE(queue.HasInFlight());
  ExpectFailure(Push({OperationNamed("same")}), StatusCode::kInvalidArgument,
                {"barrier 'same'", "already in flight"});
  Release(first);
  EXPECT_FALSE(queue.HasInFlight());
  EXPECT_TRUE(Push({OperationNamed("same")}).ok());
}

TEST_F(Submissions, ARefusedPushLeavesNothingBehind) {
  const Pointer taken = OperationNamed("taken");
  EXPECT_TRUE(Push({taken}).ok());
  EXPECT_FALSE(Push({OperationNamed("new"), OperationNamed("taken")}).ok());
  EXPECT_FALSE(Push({OperationNamed("twice"), OperationNamed("twice")}).ok());
  EXPECT_EQ(Names(queue.Take()), std::vector<std::string>{"taken"});
  EXPECT_TRUE(Push({OperationNamed("new"), OperationNamed("twice")}).ok()) << "the names are free";
  EXPECT_TRUE(queue.HasInFlight());
  EXPECT_FALSE(Push({OperationNamed("taken")}).ok()) << "the name of the earlier push is not free";
}

TEST_F(Submissions, AJoinRefusesOtherOperationsUntilItIsReleased) {
  const Pointer join = OperationNamed(kJoinName, OperationKind::kJoin);
  EXPECT_TRUE(Push({join}).ok());
  ExpectFailure(Push({OperationNamed("late")}), StatusCode::kInvalidArgument,
                {"barrier 'late'", "has joined"});
  Release(join);
  EXPECT_TRUE(Push({OperationNamed("late")}).ok());
}

TEST_F(Submissions, AreRefusedWithTheFirstReasonAfterClose) {
  const Pointer early = OperationNamed("early");
  EXPECT_TRUE(Push({early}).ok());
  EXPECT_FALSE(queue.closed());
  queue.Close(Status(StatusCode::kAborted, "first reason"));
  queue.Close(Status(StatusCode::kPeerLost, "second reason"));
  EXPECT_TRUE(queue.closed());
  ExpectFailure(Push({OperationNamed("late")}), StatusCode::kAborted,
                {"barrier 'late'", "first reason"});
  EXPECT_EQ(queue.AnyInFlight(), early) << "the operation needs an outcome";
  EXPECT_TRUE(queue.Take().empty()) << "the operation will not run";
  Release(early);
  EXPECT_EQ(queue.AnyInFlight(), nullptr);
}

TEST_F(Submissions, GiveTheEnginesThreadATurn) {
  for (int round = 0; round < 200; ++round) {
    const Pointer operation = OperationNamed("a");
    std::future<Turn> turn = AwaitTurn();
    EXPECT_TRUE(Push({operation}).ok());
    ASSERT_EQ(Get(turn), Turn::kSubmissions);
    EXPECT_EQ(queue.Take().size(), 1u);
    Release(operation);
    queue.EndTurn({});
  }
}

TEST_F(Submissions, WithAWaiterGiveTheEnginesThreadATurnOnceTheWaiterLeaves) {
  for (int round = 0; round < 200; ++round) {
    const Pointer operation = OperationNamed("a");
    std::future<Turn> turn = AwaitTurn();
    EXPECT_TRUE(Push({operation}, Start::kWithWaiter).ok());
    queue.StartNow();
    ASSERT_EQ(Get(turn), Turn::kSubmissions);
    EXPECT_EQ(queue.Take().size(), 1u);
    Release(operation);
    queue.EndTurn({});
  }
}

TEST_F(Submissions, WaitWhileAnotherThreadHasTheTurn) {
  ASSERT_TRUE(queue.TryTurn());
  EXPECT_FALSE(queue.TryTurn());
  std::future<Turn> turn = AwaitTurn();
  EXPECT_TRUE(Push({OperationNamed("a")}).ok());
  queue.StartNow();
  EXPECT_TRUE(Waits(turn));
  queue.EndTurn({});
  EXPECT_EQ(Get(turn), Turn::kSubmissions);
  EXPECT_FALSE(queue.TryTurn()) << "the engine's thread has the turn";
}

TEST_F(Submissions, WorkThatATurnLeavesIsDueOnTheEnginesThread) {
  ASSERT_TRUE(queue.TryTurn());
  std::future<Turn> turn = AwaitTurn();
  const auto due = Deadline::Clock::now() + std::chrono::milliseconds(2);
  queue.EndTurn(due);
  EXPECT_EQ(Get(turn), Turn::kDue);
  EXPECT_GE(Deadline::Clock::now(), due);
  EXPECT_TRUE(Push({OperationNamed("a")}).ok());
  EXPECT_EQ(queue.AwaitNextTurn(SubmissionQueue::kAtOnce), Turn::kDue) << "before the gathering";
  EXPECT_EQ(queue.AwaitNextTurn(Deadline::Clock::now() + std::chrono::hours(1)),
            Turn::kSubmissions);
}

TEST_F(Submissions, CloseEndsTheWaitOfTheEnginesThread) {
  std::future<Turn> turn = AwaitTurn();
  queue.Close(Status(StatusCode::kShutDown, "closed"));
  EXPECT_EQ(Get(turn), Turn::kClosed);
  EXPECT_FALSE(queue.TryTurn()) << "the engine's thread cleans up";
}

TEST_F(Submissions, CloseWaitsForTheTurnOfAnotherThread) {
  ASSERT_TRUE(queue.TryTurn());
  std::future<Turn> turn = AwaitTurn();
  queue.Close(Status(StatusCode::kShutDown, "closed"));
  EXPECT_TRUE(Waits(turn));
  queue.EndTurn(SubmissionQueue::kAtOnce);
  EXPECT_EQ(Get(turn), Turn::kClosed) << "no work is due after the close";
  EXPECT_EQ(queue.AwaitTurn(), Turn::kClosed);
}

}  // namespace
}  // namespace sparkhvd
