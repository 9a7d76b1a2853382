// Lets allocations fail. Whichever one fails, every operation must still get an outcome.
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/thorough.h"
#include "scheduler/rank.h"
#include "transport/meshes.h"

namespace {

// The number of allocations until one fails; negative if none fails.
std::atomic<long> countdown{-1};
// Only allocations of at least this many bytes count. After the end of the countdown, all of
// them fail.
std::atomic<size_t> large{0};

thread_local bool is_rank = false;

bool IsEngineThread() {
  thread_local int known = -1;
  if (known < 0) {
    std::array<char, 16> name{};
    const int error = ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    if (error != 0 || std::strcmp(name.data(), "shvd-engine") != 0) return false;
    known = 1;
  }
  return true;
}

bool Fails(size_t bytes) {
  const size_t least = large.load();
  if (countdown.load() < 0 || bytes < least || !(is_rank || IsEngineThread())) return false;
  if (least > 0) return countdown.load() == 0 || countdown.fetch_sub(1) <= 1;
  return countdown.fetch_sub(1) == 0;
}

}  // namespace

// noinline, because the compiler would otherwise report a mismatched call of free.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (Fails(bytes)) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
// The standard library's stable_sort allocates with this operator, and can do without the memory.
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return Fails(bytes) ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace sparkhvd {
namespace {

struct FailureLayout {
  const char* name;
  int size;
  // The host of every rank.
  std::vector<int> hosts;
};

void PrintTo(const FailureLayout& layout, std::ostream* out) { *out << layout.name; }

class FailingMemory : public testing::TestWithParam<FailureLayout> {
 protected:
  ~FailingMemory() override { countdown.store(-1); }

  static std::vector<Mesh> Meshes() {
    return Connect(GetParam().size, [&](MeshOptions* options) {
      const int host = GetParam().hosts[static_cast<size_t>(options->rank)];
      options->host_key = "host " + std::to_string(host);
    });
  }
};

constexpr int64_t kRowsPerRank = 3000;  // each of two floats

// Returns one operation of each kind. The fusible ones are fused.
std::vector<Request> AllKinds() {
  std::vector<Request> requests;
  for (const auto kind :
       {OperationKind::kAllreduce, OperationKind::kAllreduce, OperationKind::kAllreduce,
        OperationKind::kAllgather, OperationKind::kBroadcast, OperationKind::kAlltoall,
        OperationKind::kReducescatter, OperationKind::kBarrier}) {
    Request request;
    request.kind = kind;
    request.name = "a tensor whose name needs memory/" + std::to_string(requests.size());
    request.shape = {kRowsPerRank, 2};
    if (requests.size() == 2) request.op = ReduceOp::kAdasum;
    if (kind == OperationKind::kBarrier) request.shape = {0};
    requests.push_back(request);
  }
  return requests;
}

// Returns the outcomes of one rank's operations. Each operation must have one.
std::vector<Status> SubmitAndWait(Rank& self, int size) {
  std::vector<Status> outcomes;
  std::vector<std::vector<float>> sources;
  std::vector<std::vector<float>> targets;
  std::vector<Request> requests = AllKinds();
  std::vector<Pointer> operations;
  for (Request& request : requests) {
    sources.emplace_back(2 * kRowsPerRank, 1.0F);
    targets.emplace_back(2 * kRowsPerRank, 0.0F);
    if (request.kind == OperationKind::kAlltoall) {
      request.splits.assign(static_cast<size_t>(size), 0);
      request.splits[0] = kRowsPerRank;
    }
  }
  outcomes.reserve(requests.size());
  operations.reserve(requests.size());
  is_rank = true;
  for (size_t i = 0; i < requests.size(); ++i) {
    try {
      auto submitted =
          self.engine.Submit(requests[i], reinterpret_cast<const std::byte*>(sources[i].data()),
                             reinterpret_cast<std::byte*>(targets[i].data()),
                             i % 2 == 0 ? Start::kNow : Start::kWithWaiter);
      if (submitted.ok()) {
        operations.push_back(std::move(submitted).value());
      } else {
        is_rank = false;
        outcomes.push_back(submitted.status());
        self.engine.Abort(submitted.status().message());
      }
    } catch (const std::bad_alloc&) {  // an error of the caller, which aborts
      is_rank = false;
      self.engine.Abort("out of memory while submitting");
    }
  }
  for (const Pointer& operation : operations) {
    Status status;
    try {
      status = self.engine.Wait(*operation, Patience());
    } catch (const std::bad_alloc&) {
      is_rank = false;
      status = self.engine.Wait(*operation, Patience());
    }
    is_rank = false;
    EXPECT_TRUE(operation->done()) << "this operation has no outcome: " << status.message();
    outcomes.push_back(status);
    is_rank = true;
  }
  is_rank = false;
  return outcomes;
}

// Returns true if an allocation failed.
bool RunWithFailureAt(long number, size_t least_bytes, std::vector<Mesh> meshes, int size) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::vector<Status>> outcomes(static_cast<size_t>(size));
  {
    Gate ready(size);
    OnEveryRank(std::move(meshes), Quick(60), [&](int rank, Rank& self) {
      ready.Meet();
      large.store(least_bytes);
      countdown.store(number);
      outcomes[static_cast<size_t>(rank)] = SubmitAndWait(self, size);
    });
  }
  const bool fired = least_bytes > 0 ? countdown.load() <= 0 : countdown.load() < 0;
  countdown.store(-1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 20) << "allocation " << number;
  for (const std::vector<Status>& of_rank : outcomes) {
    for (const Status& status : of_rank) {
      if (status.ok()) continue;
      EXPECT_NE(status.message().find("memory"), std::string::npos)
          << "allocation " << number << ": " << status.message();
    }
  }
  return fired;
}

TEST_P(FailingMemory, LeavesNoOperationWithoutAnOutcome) {
  const long step =
      Thorough() ? 3 : 11;  // every allocation fails in one of the layouts, or in the next run
  for (long number = 0; RunWithFailureAt(number, 0, Meshes(), GetParam().size); number += step) {
    if (HasFailure()) return;
  }
}

TEST_P(FailingMemory, OfAWorkBufferIsTheReasonOnEveryRank) {
  int failures = 0;
  for (long number = 0; number < 6; ++number) {
    failures += RunWithFailureAt(number, 4096, Meshes(), GetParam().size) ? 1 : 0;
  }
  EXPECT_GT(failures, 0);
}

INSTANTIATE_TEST_SUITE_P(Layouts, FailingMemory,
                         testing::Values(FailureLayout{"OneHost", 2, {0, 0}},
                                         FailureLayout{"TwoHosts", 2, {0, 1}},
                                         FailureLayout{"TwoAndOne", 3, {0, 0, 1}}),
                         [](const auto& entry) { return entry.param.name; });

}  // namespace
}  // namespace sparkhvd
