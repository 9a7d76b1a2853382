#include "scheduler/lifecycle.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>

#include "scheduler/rank.h"

namespace sparkhvd {
namespace {

// A lifecycle whose thread waits for the end, and a count of its effects on the links.
struct Life {
  Life(int rank, std::shared_ptr<KeyValueStore> store)
      : lifecycle(FailureBoard{std::move(store), "test"}, rank, queue,
                  {[this](const Status&) { ++aborts; }, [this] { ++closes; }}) {}

  void Start() {
    lifecycle.Start({}, [this] { EXPECT_EQ(queue.AwaitTurn(), SubmissionQueue::Turn::kClosed); });
  }
  Status Push(const std::string& name) {
    Request request;
    request.name = name;
    request.kind = OperationKind::kBarrier;
    request.shape = {0};
    const auto operation = std::make_shared<Operation>(std::move(request), nullptr, nullptr);
    return queue.Push(Span<const Pointer>(&operation, 1), sparkhvd::Start::kNow);
  }

  EngineTimeline timeline{nullptr, ""};
  SubmissionQueue queue{true, timeline};
  std::atomic<int> aborts{0};
  std::atomic<int> closes{0};
  Lifecycle lifecycle;
};

const Status kFirst(StatusCode::kPeerLost, "the first reason");
const Status kSecond(StatusCode::kTimeout, "the second reason");

TEST(Lifecycle, PassesThroughEveryStateInOrder) {
  Life life(0, nullptr);
  Gate gate(2);
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kRunning);
  life.lifecycle.Start({}, [&] { gate.Meet(); });
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kRunning);
  EXPECT_TRUE(life.lifecycle.Reason().ok());
  ExpectFailure(life.lifecycle.Shutdown(Deadline::AfterSeconds(0)), StatusCode::kTimeout,
                {"the engine has not ended yet"});
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kEnding);
  EXPECT_EQ(life.closes, 0) << "the thread may use the links";
  gate.Meet();
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
  EXPECT_EQ(life.closes, 1);
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
  EXPECT_EQ(life.closes, 1) << "the links are closed once";
}

TEST(Lifecycle, AnOrderlyShutdownIsNoFailure) {
  Life life(0, nullptr);
  life.Start();
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  EXPECT_EQ(life.aborts, 0) << "peers may still be busy";
  EXPECT_TRUE(life.lifecycle.Failure().ok());
  ExpectFailure(life.lifecycle.Reason(), StatusCode::kShutDown, {"this rank has shut down"});
  ExpectFailure(life.Push("late"), StatusCode::kShutDown, {"'late'", "this rank has shut down"});
}

TEST(Lifecycle, AShutdownWithOperationsInFlightAbortsTheLinks) {
  Life life(0, nullptr);
  ASSERT_TRUE(life.Push("pending").ok());
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  EXPECT_EQ(life.aborts, 1);
}

TEST(Lifecycle, TheFirstReasonStays) {
  Life life(0, nullptr);
  life.Start();
  life.lifecycle.End(kFirst);
  EXPECT_EQ(life.aborts, 1);
  life.lifecycle.End(kSecond);
  life.lifecycle.EndTogether(kSecond);
  life.lifecycle.Abort("a late abort");
  EXPECT_EQ(life.lifecycle.FirstFailure(kSecond).message(), "the first reason");
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  ExpectFailure(life.lifecycle.Failure(), StatusCode::kPeerLost, {"the first reason"});
  ExpectFailure(life.Push("late"), StatusCode::kPeerLost, {"the first reason"});
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
}

TEST(Lifecycle, TheLastStateIsFinal) {
  Life life(0, nullptr);
  life.Start();
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
  life.lifecycle.End(kFirst);
  life.lifecycle.Abort("a late abort");
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
  EXPECT_TRUE(life.lifecycle.Failure().ok());
}

TEST(Lifecycle, ShutdownNeedsNoThread) {
  Life life(0, nullptr);
  EXPECT_TRUE(life.lifecycle.Shutdown(Deadline::AfterSeconds(0)).ok());
  EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
  EXPECT_EQ(life.closes, 1);
}

TEST(Lifecycle, AbortReachesTheOtherRanksOverTheBoard) {
  const auto store = std::make_shared<InProcessStore>();
  Life one(1, store);
  Life two(2, store);
  EXPECT_TRUE(two.lifecycle.Poll().ok());
  one.lifecycle.Abort("the user aborted");
  ExpectFailure(one.lifecycle.Failure(), StatusCode::kAborted, {"the user aborted"});
  EXPECT_EQ(one.lifecycle.state(), Lifecycle::State::kEnding);
  EXPECT_EQ(one.aborts, 1);
  // The broken link is only a consequence of the abort.
  two.lifecycle.EndTogether(Status(StatusCode::kPeerLost, "rank 1 has left"));
  ExpectFailure(two.lifecycle.Failure(), StatusCode::kAborted, {"rank 1", "the user aborted"});
}

TEST(Lifecycle, PollFindsTheFailureOfAnotherRank) {
  const auto store = std::make_shared<InProcessStore>();
  Life one(1, store);
  Life two(2, store);
  one.lifecycle.EndTogether(kFirst);
  ExpectFailure(two.lifecycle.Poll(), StatusCode::kPeerLost, {"rank 1", "the first reason"});
  EXPECT_EQ(two.lifecycle.state(), Lifecycle::State::kRunning) << "the caller decides";
  ExpectFailure(one.lifecycle.Poll(), StatusCode::kPeerLost, {"the first reason"});
}

TEST(Lifecycle, AThreadThatStopsTooEarlyIsAFailure) {
  Life life(0, nullptr);
  life.lifecycle.Start({}, [] {});
  while (life.lifecycle.state() != Lifecycle::State::kEnded) std::this_thread::yield();
  ExpectFailure(life.lifecycle.Failure(), StatusCode::kInternal, {"thread has stopped"});
  EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok());
}

TEST(Lifecycle, AProcessorCoreThatDoesNotExistEndsTheEngine) {
  Life life(0, nullptr);
  life.lifecycle.Start(
      1'000'000, [&life] { EXPECT_EQ(life.queue.AwaitTurn(), SubmissionQueue::Turn::kClosed); });
  while (life.lifecycle.state() != Lifecycle::State::kEnded) std::this_thread::yield();
  EXPECT_FALSE(life.lifecycle.Failure().ok());
  EXPECT_EQ(life.aborts, 1);
}

TEST(Lifecycle, ManyThreadsMayEndItAtOnce) {
  for (int round = 0; round < 50; ++round) {
    Life life(0, nullptr);
    life.Start();
    std::vector<std::thread> threads;
    threads.emplace_back([&] { life.lifecycle.End(kFirst); });
    threads.emplace_back([&] { life.lifecycle.Abort("abort"); });
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] { EXPECT_TRUE(life.lifecycle.Shutdown(Patience()).ok()); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(life.lifecycle.state(), Lifecycle::State::kLeft);
    EXPECT_EQ(life.closes, 1);
    EXPECT_FALSE(life.lifecycle.Reason().ok());
  }
}

}  // namespace
}  // namespace sparkhvd
