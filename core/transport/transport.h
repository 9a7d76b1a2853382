// Moves bytes between the ranks of one job: post first, then wait.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/link_costs.h"

namespace sparkhvd {

// Identifies one posted transfer of one Transport. Valid until a Wait on it returns.
using Ticket = uint64_t;

// Point-to-point transfers among `size` ranks. Messages from one rank to another arrive in the
// order in which they were posted. Both sides know the length, unless the receiver posts
// PostReceiveUpTo: a send of n bytes matches a receive of exactly n bytes, and n may be 0. The
// caller keeps the memory alive until Wait returns. One thread posts and waits at a time. Any
// thread may call Abort.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual LinkCosts costs() const { return LinkCosts(); }

  virtual Result<Ticket> PostSend(int peer, ConstBytes data) = 0;
  virtual Result<Ticket> PostReceive(int peer, Bytes data) = 0;
  // Receives a message of at most data.size() bytes. Wait sets `length`.
  virtual Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) = 0;

  // Returns once all tickets are complete, or with the first failure: kTimeout ("receive from rank
  // 5: 0 of 65536 bytes"), kPeerLost if a peer of a pending ticket has ended, or the reason passed
  // to Abort. After a failure, the transport stays broken and touches no buffer.
  virtual Status Wait(Span<const Ticket> tickets, Deadline deadline) = 0;

  // Wakes every waiter on this rank with `why` and makes later calls fail with it. Peers notice
  // that this rank has ended.
  virtual void Abort(const Status& why) = 0;
};

}  // namespace sparkhvd
