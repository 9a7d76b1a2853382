// A thread that exchanges the parts of an allreduce between hosts.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "collectives/slices.h"

namespace sparkhvd {

// Exchanges parts one after the other, while the caller works on other parts inside its host.
class LaneThread {
 public:
  // `exchange` has a deadline of its own, which therefore limits every wait of this class. Without
  // `overlap`, and if no thread can be started, the caller exchanges each part in Begin.
  LaneThread(std::function<Status(Slice)> exchange, bool overlap);
  // Waits for the current exchange. Begins no other one.
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  void Begin(Slice part);
  // Waits until one more part has been exchanged. After a failure, fails with its reason.
  Status AwaitNext();

  // Returns whether the thread has parts left to exchange.
  bool busy() const;

 private:
  void Run();
  void Note(Status status);

  const std::function<Status(Slice)> exchange_;
  mutable std::mutex mutex_;  // guards the following fields
  std::condition_variable changed_;
  std::vector<Slice> parts_;  // all parts of the thread
  size_t exchanged_ = 0;      // parts
  size_t reported_ = 0;       // parts, by AwaitNext
  Status failure_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace sparkhvd
