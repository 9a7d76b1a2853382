// Some ranks of a transport as a separate transport.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace sparkhvd {

// Numbers `ranks` of `whole`, which include this rank, as 0, 1, 2... Posts and waits go to `whole`,
// so failures name its ranks. `sharing` is the number of subsets that use the same network lines at
// the same time.
class TransportSubset final : public Transport {
 public:
  TransportSubset(Transport& whole, std::vector<int> ranks, int sharing = 1)
      : whole_(whole),
        sharing_(sharing),
        ranks_(std::move(ranks)),
        rank_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), whole.rank()) -
                               ranks_.begin())) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  LinkCosts costs() const override {
    LinkCosts costs = whole_.costs();
    costs.per_byte *= sharing_;
    return costs;
  }
  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    return whole_.PostSend(ranks_[static_cast<size_t>(peer)], data);
  }
  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return whole_.PostReceive(ranks_[static_cast<size_t>(peer)], data);
  }
  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return whole_.PostReceiveUpTo(ranks_[static_cast<size_t>(peer)], data, length);
  }
  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    return whole_.Wait(tickets, deadline);
  }
  void Abort(const Status& why) override { whole_.Abort(why); }

 private:
  Transport& whole_;
  const int sharing_;
  const std::vector<int> ranks_;
  const int rank_;
};

}  // namespace sparkhvd
