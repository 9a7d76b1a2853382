// Monotonic counters of an engine's work.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "scheduler/request.h"

namespace sparkhvd {

// An upper bound on the number of operation kinds.
constexpr size_t kMostOperationKinds = 32;

struct KindCounters {
  std::atomic<uint64_t> operations{0};
  std::atomic<uint64_t> bytes{0};
};

// Converts a duration to the unit of the counters.
inline uint64_t Microseconds(std::chrono::steady_clock::duration duration) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(duration).count());
}

// The thread that drives the cycle writes the counters. Any thread may read them.
struct Counters {
  std::atomic<uint64_t> operations{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> cycles{0};
  std::atomic<uint64_t> cache_hits{0};
  std::atomic<uint64_t> fused_buffers{0};
  std::atomic<uint64_t> hierarchical{0};  // collectives; a fused collective counts once
  std::atomic<uint64_t> on_device{0};     // collectives; a fused collective counts once
  // The time of each phase. The engine runs one phase at a time. Operations queue concurrently, so
  // their queue time is a sum over operations.
  std::atomic<uint64_t> queue_us{0};
  std::atomic<uint64_t> negotiation_us{0};
  std::atomic<uint64_t> collective_us{0};  // includes the copies
  std::atomic<uint64_t> fusion_copy_us{0};
  std::array<KindCounters, kMostOperationKinds> by_kind;

  // Counts operations that have succeeded.
  void Add(OperationKind kind, size_t number, size_t total_bytes) {
    operations += number;
    bytes += total_bytes;
    KindCounters& of_kind = by_kind[static_cast<size_t>(kind)];
    of_kind.operations += number;
    of_kind.bytes += total_bytes;
  }
};

}  // namespace sparkhvd
