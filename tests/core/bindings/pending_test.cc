// Tests the list of the operations that are not done yet.
#include "bindings/pending.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace sparkhvd::bindings {
namespace {

std::shared_ptr<Operation> Submitted(const std::string& name) {
  Request request;
  request.name = name;
  return std::make_shared<Operation>(std::move(request), nullptr, nullptr);
}

TEST(PendingOperationsTest, ForgetsEndedOperationsBehindOneThatDoesNotEnd) {
  PendingOperations pending;
  const std::shared_ptr<Operation> first = Submitted("first");
  pending.Add(first);
  for (int i = 0; i < 1000; ++i) {
    const std::shared_ptr<Operation> next = Submitted("next");
    pending.Add(next);
    next->Complete(Status());
    ASSERT_LE(pending.size(), 20U);
  }
  ASSERT_EQ(pending.List().size(), 1U);
  EXPECT_EQ(pending.List()[0].first, "allreduce 'first'");
}

TEST(PendingOperationsTest, ListsOperationsInTheOrderOfSubmission) {
  PendingOperations pending;
  std::vector<std::shared_ptr<Operation>> submitted;
  for (int i = 0; i < 100; ++i) {
    submitted.push_back(Submitted(std::to_string(i)));
    pending.Add(submitted.back());
    if (i % 2 == 0) submitted.back()->Complete(Status());
  }
  const auto listed = pending.List();
  ASSERT_EQ(listed.size(), 50U);
  for (size_t i = 0; i < listed.size(); ++i) {
    EXPECT_EQ(listed[i].first, "allreduce '" + std::to_string(2 * i + 1) + "'");
  }
}

}  // namespace
}  // namespace sparkhvd::bindings
