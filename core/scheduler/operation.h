// One submitted collective: the ticket that its submitter waits for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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

// Shared by the submitter and the engine. The owner of the buffers keeps them alive until
// settled().
class Operation {
 public:
  // `device` is null for host memory.
  Operation(Request request, const std::byte* source, std::byte* target,
            std::unique_ptr<DeviceWork> device = nullptr)
      : request_(std::move(request)),
        count_(ElementCount(request_.shape).value_or(0)),
        source_(source),
        target_(target),
        device_(std::move(device)) {}

  // Reads from and writes to `content`, which the operation owns.
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
  // Returns null for host memory and for operations that own their content.
  DeviceWork* device() const { return device_.get(); }
  Deadline::Clock::time_point submitted() const { return submitted_; }

  // With device memory, an operation is done once its work is enqueued. A stream that waits for the
  // operation sees the result.
  bool done() const { return done_.load(std::memory_order_acquire); }

  // Returns whether the operation is done and nothing uses its buffers.
  bool settled() const { return done() && (!device_ || device_->Finished()); }

  // Valid once the operation is done.
  const Status& outcome() const { return status_; }

  // Waits for the outcome. At the deadline, returns kTimeout with the tensor's name, and the
  // operation continues.
  Status Wait(Deadline deadline) {
    if (done()) return status_;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_until(lock, deadline.at(), [this] { return done(); })) {
      return Status(StatusCode::kTimeout,
                    request_.Title() + ": not finished yet; some rank may not have submitted it");
    }
    return status_;
  }

  // Returns the data of all ranks in rank order, once an allgather or alltoall is done. For device
  // memory, the DeviceWork holds the data.
  Bytes output() const { return Bytes(output_.get(), output_bytes_); }
  // Returns the rows of the output by rank. For a join, returns only the last rank to join.
  const std::vector<int64_t>& rows() const { return rows_; }

  // Only the engine calls the following functions.
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
    } catch (...) {  // the title may need memory, too
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

  // Guards status_ until done_ is set. Afterwards, status_ is constant. Innermost in the lock
  // order.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  Status status_;
};

// An operation that all ranks run next, with the rows of its Agreement.
struct ReadyOperation {
  std::shared_ptr<Operation> operation;
  std::vector<int64_t> rows;
};

}  // namespace sparkhvd
