// One submitted collective: the ticket that its submitter waits on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "device/work.h"
#include "scheduler/request.h"

namespace sparkhvd {

// Shared by the submitter and the engine. The owner of the buffers keeps them alive until done().
class Operation {
 public:
  // `device` is null for the memory of the host.
  Operation(Request request, const std::byte* source, std::byte* target,
            std::unique_ptr<DeviceWork> device = nullptr)
      : request_(std::move(request)),
        count_(ElementCount(request_.shape).value_or(0)),
        source_(source),
        target_(target),
        device_(std::move(device)) {}

  // Reads from and writes to `content`, which it owns.
  Operation(Request request, std::vector<std::byte> content)
      : request_(std::move(request)),
        count_(ElementCount(request_.shape).value_or(0)),
        content_(std::move(content)),
        source_(content_.data()),
        target_(content_.data()) {}

  const Request& request() const { return request_; }
  const std::byte* source() const { return source_; }
  std::byte* target() const { return target_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count() * SizeOf(request_.dtype); }
  // Null for the memory of the host, and for operations that own their content.
  DeviceWork* device() const { return device_.get(); }
  Deadline::Clock::time_point submitted() const { return submitted_; }

  // With device memory, done means that the work is enqueued: later work on a stream that waits for
  // it sees the result.
  bool done() const { return done_.load(std::memory_order_acquire); }

  // Whether it is done and nothing uses the buffers.
  bool settled() const { return done() && (!device_ || device_->Finished()); }

  // For use once it is done.
  const Status& outcome() const { return status_; }

  // Waits for the outcome; fails with kTimeout and the tensor's name at the deadline (the operation
  // continues).
  Status Wait(Deadline deadline) {
    if (done()) return status_;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_until(lock, deadline.at(), [this] { return done(); })) {
      return Status(StatusCode::kTimeout,
                    request_.Title() + ": not finished yet; some rank may not have submitted it");
    }
    return status_;
  }

  // Allgather and alltoall, once done: the data of all ranks, in rank order; on a device its
  // DeviceWork has it.
  Bytes output() const { return Bytes(output_.get(), output_bytes_); }
  // The rows of the output by rank. Join: only the number of the last rank to join.
  const std::vector<int64_t>& rows() const { return rows_; }

  // For the engine only.
  void SetOutput(std::unique_ptr<std::byte[]> output, size_t bytes, std::vector<int64_t> rows) {
    output_ = std::move(output);
    output_bytes_ = bytes;
    rows_ = std::move(rows);
  }
  void Complete(const Status& status) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!status.ok()) SetFailure(status);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }

 private:
  void SetFailure(const Status& status) noexcept {
    try {
      status_ = status.Annotate(request_.Title());
    } catch (...) {  // the title needs memory, too
      status_ = AnnotateIfPossible(status, "");
    }
  }

  const Request request_;
  const size_t count_;
  std::vector<std::byte> content_;
  const std::byte* const source_;
  std::byte* const target_;
  const std::unique_ptr<DeviceWork> device_;
  const Deadline::Clock::time_point submitted_ = Deadline::Clock::now();
  std::unique_ptr<std::byte[]> output_;
  size_t output_bytes_ = 0;
  std::vector<int64_t> rows_;

  // Guards status_ until done_, after which it does not change. A leaf: nothing else is locked
  // while it is held.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  Status status_;
};

// An operation that all ranks agreed on, and the rows of the agreement.
struct Ready {
  std::shared_ptr<Operation> operation;
  std::vector<int64_t> rows;
};

}  // namespace sparkhvd
