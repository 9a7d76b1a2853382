// Tests the scheduler's decisions, which are pure functions of plain data.
#include <gtest/gtest.h>

#include <random>

#include "scheduler/fusion.h"
#include "scheduler/messages.h"
#include "scheduler/readiness.h"
#include "scheduler/response_cache.h"

namespace sparkhvd {
namespace {

Request Allreduce(const std::string& name, std::vector<int64_t> shape = {4}) {
  Request request;
  request.name = name;
  request.shape = std::move(shape);
  return request;
}

Request Allgather(const std::string& name, int64_t rows) {
  Request request = Allreduce(name, {rows, 3});
  request.kind = OperationKind::kAllgather;
  return request;
}

Request Alltoall(std::vector<int64_t> splits) {
  Request request = Allgather("exchange", 0);
  request.kind = OperationKind::kAlltoall;
  for (const int64_t rows : splits) request.shape[0] += rows;
  request.splits = std::move(splits);
  return request;
}

Readiness::Time At(int seconds) { return Readiness::Time{} + std::chrono::seconds(seconds); }

RequestMessage Full(std::vector<Request> requests) {
  return RequestMessage{{}, std::move(requests)};
}

std::string MismatchOf(const Request& first, const Request& second) {
  return Disagreement(first, 0, second, 3).value_or("agreed");
}

TEST(Request, DisagreementNamesTheFieldBothRanksAndBothValues) {
  const Request base = Allreduce("x", {2, 3});
  Request other = base;
  EXPECT_EQ(MismatchOf(base, other), "agreed");
  other.shape = {2, 4};
  EXPECT_EQ(MismatchOf(base, other),
            "ranks disagree about the shape: rank 0 submitted (2, 3), rank 3 submitted (2, 4)");
  other = base;
  other.dtype = DType::kInt8;
  EXPECT_EQ(MismatchOf(base, other),
            "ranks disagree about the dtype: rank 0 submitted float32, rank 3 submitted int8");
  other = base;
  other.op = ReduceOp::kMax;
  EXPECT_EQ(
      MismatchOf(base, other),
      "ranks disagree about the reduce operation: rank 0 submitted sum, rank 3 submitted max");
  other = base;
  other.postscale = 0.5;
  EXPECT_EQ(MismatchOf(base, other),
            "ranks disagree about the postscale: rank 0 submitted 1, rank 3 submitted 0.5");
  other = base;
  other.kind = OperationKind::kBroadcast;
  EXPECT_EQ(
      MismatchOf(base, other),
      "ranks disagree about the operation: rank 0 submitted allreduce, rank 3 submitted broadcast");
  other = base;
  other.on_device = true;
  EXPECT_EQ(MismatchOf(base, other),
            "ranks disagree about the memory: rank 0 submitted a tensor in host memory, rank 3 "
            "submitted a tensor in CUDA device memory");
  EXPECT_EQ(MismatchOf(Allgather("g", 1), Allgather("g", 7)), "agreed");
  EXPECT_EQ(MismatchOf(Alltoall({1, 2}), Alltoall({0, 9})), "agreed");
  EXPECT_NE(MismatchOf(Alltoall({1, 2}), Allgather("exchange", 3)), "agreed");
}

TEST(Request, ProblemRefusesInvalidSplits) {
  EXPECT_EQ(Problem(Alltoall({1, 2}), 2), std::nullopt);
  EXPECT_NE(Problem(Alltoall({1, 2}), 3)->find("has 2 entries for 3 ranks"), std::string::npos);
  Request request = Alltoall({1, 2});
  for (const std::vector<int64_t>& splits :
       {std::vector<int64_t>{1, 1}, {4, -1}, {std::numeric_limits<int64_t>::max(), 4}}) {
    request.splits = splits;
    EXPECT_NE(Problem(request, 2)->find("does not add up to the first dimension (3)"),
              std::string::npos);
  }
  request.shape = {};
  EXPECT_NE(Problem(request, 2)->find("no first dimension to divide"), std::string::npos);
}

TEST(Request, ProblemRefusesInvalidRequests) {
  EXPECT_EQ(Problem(Allreduce("x"), 2), std::nullopt);
  EXPECT_NE(Problem(Allreduce("x", {-1}), 2)->find("(-1,)"), std::string::npos);
  EXPECT_NE(Problem(Allreduce("x", {int64_t{1} << 40, int64_t{1} << 40}), 2), std::nullopt);
  Request broadcast = Allreduce("x");
  broadcast.kind = OperationKind::kBroadcast;
  broadcast.root = 2;
  EXPECT_NE(Problem(broadcast, 2)->find("root 2"), std::string::npos);
  Request average = Allreduce("x");
  average.dtype = DType::kBool;
  average.op = ReduceOp::kAverage;
  EXPECT_NE(Problem(average, 2)->find("bool has no average"), std::string::npos);
  Request scaled = Allreduce("x");
  scaled.prescale = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(Problem(scaled, 2)->find("finite"), std::string::npos);
}

TEST(ResponseCache, GivesEqualRanksEqualIdsAndEvictsTheLeastRecentlyUsed) {
  ResponseCache cache(2);
  cache.Insert(Allreduce("a"), {});
  cache.Insert(Allreduce("b"), {});
  EXPECT_EQ(cache.Find(Allreduce("a")), 0u);
  EXPECT_EQ(cache.Find(Allreduce("a", {5})), std::nullopt);
  cache.Touch(0);
  EXPECT_EQ(cache.NextId("c"), 1u);
  cache.Insert(Allreduce("c"), {});
  EXPECT_EQ(cache.Find(Allreduce("b")), std::nullopt);
  EXPECT_EQ(cache.Find(Allreduce("c")), 1u);
  cache.Insert(Allreduce("a", {5}), {});
  EXPECT_EQ(cache.Find(Allreduce("a", {5})), 0u);
  ResponseCache none(0);
  none.Insert(Allreduce("a"), {});
  EXPECT_EQ(none.Find(Allreduce("a")), std::nullopt);
}

TEST(ResponseCache, StoresOnlyNamesThatRecur) {
  ResponseCache cache(2);
  EXPECT_FALSE(cache.Recurs("a"));
  EXPECT_FALSE(cache.Recurs("b"));
  EXPECT_TRUE(cache.Recurs("a"));
  EXPECT_TRUE(cache.Recurs("b"));
  cache.Insert(Allreduce("a"), {});
  for (int number = 0; number < 1000; ++number) {
    EXPECT_FALSE(cache.Recurs("noname." + std::to_string(number)));
  }
  EXPECT_TRUE(cache.Recurs("a")) << "it has an entry";
  EXPECT_FALSE(cache.Recurs("b")) << "too many other names";
  ResponseCache none(0);
  EXPECT_FALSE(none.Recurs("a"));
  EXPECT_FALSE(none.Recurs("a"));
}

TEST(ResponseCache, RemembersTheRowsThatEveryRankSent) {
  ResponseCache cache(2);
  cache.Insert(Allgather("g", 1), {1, 5});
  EXPECT_TRUE(cache.OfRank(0, 0) == Allgather("g", 1));
  EXPECT_TRUE(cache.OfRank(0, 1) == Allgather("g", 5));
  EXPECT_EQ(cache.Find(Allgather("g", 2)), std::nullopt);
}

TEST(ResponseCache, HoldsAnAlltoallForAnySplits) {
  ResponseCache cache(2);
  cache.Insert(Alltoall({1, 2}), {});
  EXPECT_TRUE(cache.Own(0).splits.empty());
  EXPECT_EQ(cache.Find(Alltoall({9, 0})), 0u);
  Request wider = Alltoall({1, 2});
  wider.shape.push_back(2);
  EXPECT_EQ(cache.Find(wider), std::nullopt);
}

TEST(Readiness, AgreesOnAnAlltoallWithoutItsSplits) {
  const ResponseCache cache(0);
  Readiness readiness(2);
  ASSERT_TRUE(readiness.Add(0, Full({Alltoall({1, 2})}), cache, At(0)).ok());
  ASSERT_TRUE(readiness.Add(1, Full({Alltoall({5, 6})}), cache, At(0)).ok());
  const ResponseMessage response = readiness.TakeComplete(cache);
  ASSERT_EQ(response.agreements.size(), 1u);
  EXPECT_EQ(response.agreements[0].code, StatusCode::kOk);
  EXPECT_TRUE(response.agreements[0].rows.empty());
}

TEST(Readiness, ListsCompleteRequestsInTheOrderOfCompletion) {
  const ResponseCache cache(0);
  Readiness readiness(2);
  ASSERT_TRUE(readiness.Add(0, Full({Allreduce("a"), Allreduce("b")}), cache, At(0)).ok());
  EXPECT_TRUE(readiness.TakeComplete(cache).agreements.empty());
  ASSERT_TRUE(readiness.Add(1, Full({Allreduce("b"), Allreduce("a")}), cache, At(1)).ok());
  const ResponseMessage response = readiness.TakeComplete(cache);
  ASSERT_EQ(response.agreements.size(), 2u);
  EXPECT_EQ(response.agreements[0].name, "b");
  EXPECT_EQ(response.agreements[1].name, "a");
  EXPECT_TRUE(readiness.empty());
}

TEST(Readiness, MixesIdsAndFullRequestsOfOneName) {
  ResponseCache cache(4);
  cache.Insert(Allgather("g", 1), {1, 2});
  for (const bool hit_first : {true, false}) {
    Readiness readiness(2);
    const RequestMessage hit{{0}, {}};
    const RequestMessage full = Full({Allgather("g", 9)});
    if (hit_first) {
      ASSERT_TRUE(readiness.Add(0, hit, cache, At(0)).ok());
    }
    ASSERT_TRUE(readiness.Add(1, full, cache, At(0)).ok());
    if (!hit_first) {
      ASSERT_TRUE(readiness.Add(0, hit, cache, At(0)).ok());
    }
    const ResponseMessage response = readiness.TakeComplete(cache);
    EXPECT_TRUE(response.cached.empty());
    ASSERT_EQ(response.agreements.size(), 1u);
    EXPECT_EQ(response.agreements[0].rows, (std::vector<int64_t>{1, 9}));
  }
}

TEST(Readiness, KeepsHitsWhoseIdIsReused) {
  ResponseCache cache(1);
  cache.Insert(Allreduce("a"), {});
  Readiness readiness(2);
  ASSERT_TRUE(readiness.Add(0, RequestMessage{{0}, {}}, cache, At(0)).ok());
  readiness.Forget(0, cache);
  cache.Insert(Allreduce("b"), {});
  ASSERT_TRUE(readiness.Add(1, Full({Allreduce("a")}), cache, At(0)).ok());
  ASSERT_EQ(readiness.TakeComplete(cache).agreements.size(), 1u);
  EXPECT_TRUE(readiness.empty());
}

TEST(Readiness, ARankThatJoinsTakesPartInWhatItRequestedBefore) {
  ResponseCache cache(4);
  cache.Insert(Allgather("g", 1), {1, 2});
  Request join;
  join.kind = OperationKind::kJoin;
  join.name = kJoinName;
  Readiness readiness(2);
  ASSERT_TRUE(readiness.Add(0, RequestMessage{{0}, {join}}, cache, At(0)).ok());
  ASSERT_TRUE(readiness.Add(1, RequestMessage{{0}, {}}, cache, At(0)).ok());
  const ResponseMessage response = readiness.TakeComplete(cache);
  ASSERT_EQ(response.agreements.size(), 1u);
  EXPECT_EQ(response.agreements[0].rows, (std::vector<int64_t>{1, 2}));
  EXPECT_FALSE(response.agreements[0].request) << "no rank needs a substitute";
  ASSERT_TRUE(readiness.Add(1, Full({join}), cache, At(1)).ok());
  ASSERT_EQ(readiness.TakeComplete(cache).agreements.size(), 1u);
  EXPECT_TRUE(readiness.empty());
}

TEST(Readiness, OverdueNamesTheMissingRanks) {
  ResponseCache cache(4);
  cache.Insert(Allreduce("hit"), {});
  Readiness readiness(3);
  ASSERT_TRUE(readiness.Add(0, RequestMessage{{0}, {Allreduce("a")}}, cache, At(0)).ok());
  ASSERT_TRUE(readiness.Add(2, Full({Allreduce("a"), Allreduce("late")}), cache, At(5)).ok());
  const std::vector<Agreement> overdue = readiness.TakeOverdue(cache, At(3));
  ASSERT_EQ(overdue.size(), 2u);
  EXPECT_EQ(overdue[0].name, "a");
  EXPECT_EQ(overdue[0].message,
            "not submitted by rank 1 while ranks 0, 2 waited for the whole collective timeout");
  EXPECT_EQ(overdue[1].name, "hit");
  EXPECT_EQ(overdue[1].code, StatusCode::kTimeout);
  EXPECT_TRUE(readiness.TakeOverdue(cache, At(3)).empty());
}

TEST(Readiness, RefusesAnIdWithoutAnAgreement) {
  const ResponseCache cache(4);
  Readiness readiness(2);
  EXPECT_EQ(readiness.Add(1, RequestMessage{{7}, {}}, cache, At(0)).code(), StatusCode::kInternal);
}

TEST(Fusion, FusesOnlyEqualAllreducesUpToTheThreshold) {
  Request other = Allreduce("other");
  other.dtype = DType::kFloat64;
  const Request a = Allreduce("a", {100});
  const Request b = Allreduce("b", {100});
  const Request c = Allreduce("c", {100});
  const Request gather = Allgather("g", 1);
  using Groups = std::vector<std::vector<size_t>>;
  EXPECT_EQ(PlanFusion({&a, &other, &gather, &b, &c}, 900), (Groups{{0, 3}, {1}, {2}, {4}}));
  EXPECT_EQ(PlanFusion({&a, &b, &c}, 0), (Groups{{0}, {1}, {2}}));
  EXPECT_EQ(PlanFusion({}, 100), Groups{});
}

TEST(Fusion, FusesAllOperationsOfAKindOnDevices) {
  using Groups = std::vector<std::vector<size_t>>;
  Request sum = Allreduce("sum", {100});
  Request highest = Allreduce("highest", {100});
  highest.op = ReduceOp::kMax;
  Request gather = Allgather("gather", 2);
  const Request host = Allreduce("host", {100});
  sum.on_device = highest.on_device = gather.on_device = true;
  EXPECT_EQ(PlanFusion({&sum, &gather, &host, &highest}, 0), (Groups{{0, 3}, {1}, {2}}));
}

TEST(Messages, SurviveSerialization) {
  Request request = Allgather("tensor/\xc3\xa4", 5);
  request.prescale = 0.25;
  request.root = -3;
  const RequestMessage sent{{0, 9, 1023}, {request, Allreduce("", {})}};
  const std::vector<std::byte> bytes = Encode(sent);
  const Result<RequestMessage> back = DecodeRequestMessage(ConstBytes(bytes.data(), bytes.size()));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back.value().cached, sent.cached);
  EXPECT_TRUE(back.value().requests == sent.requests);
  Request joined = Allreduce("j");
  joined.kind = OperationKind::kAlltoall;
  joined.splits = {3, 1};
  joined.group = "some";
  joined.group_size = 7;
  joined.on_device = true;
  const ResponseMessage answer{
      {3}, {{"x", StatusCode::kMismatch, "why", {1, 2}, {}}, {"y", {}, "", {}, joined}}};
  const std::vector<std::byte> more = Encode(answer);
  const Result<ResponseMessage> again = DecodeResponseMessage(ConstBytes(more.data(), more.size()));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.value().cached, answer.cached);
  EXPECT_EQ(again.value().agreements[0].message, "why");
  EXPECT_EQ(again.value().agreements[0].rows, (std::vector<int64_t>{1, 2}));
  EXPECT_FALSE(again.value().agreements[0].request.has_value());
  EXPECT_TRUE(again.value().agreements[1].request == joined);
}

TEST(Messages, SteadyStateFitsIntoAFewBytes) {
  RequestMessage message;
  for (uint32_t id = 0; id < 1024; ++id) message.cached.push_back(id);
  EXPECT_LE(Encode(message).size(), 140u);
}

TEST(Messages, TheSplitsOfAnAlltoallAreNotSent) {
  const size_t bytes = Encode(Full({Alltoall({1, 2})})).size();
  EXPECT_EQ(Encode(Full({Alltoall(std::vector<int64_t>(1000, 1))})).size(), bytes);
}

TEST(Messages, EveryTruncationIsRefused) {
  const std::vector<std::byte> bytes = Encode(RequestMessage{{1, 2}, {Allgather("abc", 5)}});
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeRequestMessage(ConstBytes(bytes.data(), length)).ok()) << length;
  }
}

TEST(Messages, ArbitraryBytesAreReadOrRefused) {
  std::mt19937 random(7);
  Request grouped = Alltoall({4, 5});
  grouped.group = "some";
  grouped.group_size = 2;
  const std::vector<std::byte> requests =
      Encode(RequestMessage{{1, 700}, {Allgather("abc", 5), Allreduce("defg", {1, 2}), grouped}});
  const std::vector<std::byte> agreements =
      Encode(ResponseMessage{{1, 700}, {{"abc", {}, "", {4, 5}, grouped}, {"d", {}, "w", {}, {}}}});
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes = round % 4 < 2 ? requests : agreements;
    if (round % 2 == 0) bytes.resize(random() % 80);
    const size_t changes = 1 + random() % 6;
    for (size_t i = 0; i < changes && !bytes.empty(); ++i) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random() % 256);
    }
    const ConstBytes view(bytes.data(), bytes.size());
    const Result<RequestMessage> request = DecodeRequestMessage(view);
    if (request.ok()) {
      EXPECT_LE(request.value().requests.size(), bytes.size());
    }
    const Result<ResponseMessage> response = DecodeResponseMessage(view);
    if (response.ok()) {
      EXPECT_LE(response.value().agreements.size(), bytes.size());
    }
  }
}

}  // namespace
}  // namespace sparkhvd
