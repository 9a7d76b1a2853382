// Memory that the ranks of one host share, and the steps that synchronize its use.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// An arena has one region and one counter per member. Members are numbered 0 to count() - 1 in rank
// order, and `ranks()[i]` is the rank of member i. A collective over the arena is a series of
// steps. In each, a member writes its own region, calls Arrive and AwaitAll, and reads the others.
class Arena {
 public:
  virtual ~Arena() = default;

  virtual int member() const = 0;
  virtual int count() const = 0;
  virtual const std::vector<int>& ranks() const = 0;

  // Returns the region of `member`. All regions have the same size, a multiple of 4096, and
  // begin in the middle of a page.
  virtual Bytes Region(int member) const = 0;

  // Publishes everything that this member has written (release) and advances its counter by one.
  // Returns the new value.
  virtual uint64_t Arrive() = 0;

  // Waits until every member's counter has reached `step` (acquire). Fails with kTimeout and the
  // missing ranks, with kPeerLost if a member's process has ended, or with the reason passed to
  // Abort. A step that all members have reached stays reached, even after an Abort.
  virtual Status AwaitAll(uint64_t step, Deadline deadline) = 0;
  virtual Status Await(int member, uint64_t step, Deadline deadline) = 0;

  virtual void Abort(const Status& why) = 0;
};

}  // namespace sparkhvd
