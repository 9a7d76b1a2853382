// A network in virtual time: ranks are threads that run the real algorithms, and every message
// has the cost of a model. Results do not depend on the machine or its load.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace sparkhvd {

// The LogGP model (Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: Incorporating long messages
// into the LogP model", 1997), with the latency of one direction and one message per post.
struct NetworkCosts {
  double latency = 20e-6;           // seconds from the last byte sent to the last byte received
  double latency_in_host = 5e-6;    // the same between ranks of one host
  double per_message = 2e-6;        // seconds of the processor, at each end
  double per_byte = 0.8e-9;         // of the rank's share of its host's link; 0.8e-9 is 10 Gbit/s
  double per_byte_in_host = 1e-10;  // the same between ranks of one host
  size_t buffered = size_t{64} << 10;  // the sender of a message up to this size does not wait
};

// The clock of a rank, and the messages that it has sent.
struct VirtualRank {
  double now = 0;  // seconds
  size_t messages = 0;
  size_t bytes = 0;
};

// Messages of a rank leave one after the other, and those that it waits for together arrive one
// after the other, in the order of their arrival times. There is no congestion inside the network.
class VirtualNetwork {
 public:
  // `hosts[r]` is the host of rank r. A byte of a message counts as `scale` bytes, so that large
  // data needs little memory. Messages up to `unscaled` bytes count as they are.
  VirtualNetwork(std::vector<int> hosts, const NetworkCosts& costs, double scale = 1,
                 size_t unscaled = 0)
      : hosts_(std::move(hosts)),
        costs_(costs),
        scale_(scale),
        unscaled_(unscaled),
        ranks_(hosts_.size()) {}

  // Makes the rank's link between hosts slower by `factor`, in both directions. Call it before the
  // ranks run.
  void SlowDown(int rank, double factor) { At(rank).slowness = factor; }

  // Lets a rank compute for `seconds`. Only the thread of the rank may call it.
  void Compute(int rank, double seconds) { At(rank).own.now += seconds; }

  // Runs `body` for every rank, each on a thread.
  void OnEveryRank(const std::function<void(Transport&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(hosts_.size()); ++rank) {
      threads.emplace_back([this, &body, rank] {
        Link link(*this, rank);
        body(link);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const VirtualRank& rank(int rank) const { return At(rank).own; }
  double Latest() const {
    double latest = 0;
    for (const Rank& rank : ranks_) latest = std::max(latest, rank.own.now);
    return latest;
  }

 private:
  struct Message {
    std::vector<std::byte> content;
    double sent;  // when the last byte left
    double latency;
    double sending;    // seconds on the sender's line
    double receiving;  // seconds on the receiver's line
  };
  struct Receive {
    int peer;
    Bytes target;
    size_t* length;
  };
  struct Rank {
    VirtualRank own;
    double slowness = 1;
    double sending_until = 0;
    double receiving_until = 0;
    Ticket last = 0;
    std::map<Ticket, double> sends;      // when the sender may continue
    std::map<Ticket, Receive> receives;  // ascending, so each peer's in their order

    std::mutex mutex;  // guards the fields below; innermost in the lock order
    std::condition_variable changed;
    std::map<int, std::deque<Message>> inbox;  // by sender
  };

  class Link final : public Transport {
   public:
    Link(VirtualNetwork& network, int rank) : network_(network), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(network_.hosts_.size()); }
    Result<Ticket> PostSend(int peer, ConstBytes data) override {
      return network_.Send(rank_, peer, data);
    }
    Result<Ticket> PostReceive(int peer, Bytes data) override {
      return network_.Post(rank_, Receive{peer, data, nullptr});
    }
    Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
      return network_.Post(rank_, Receive{peer, data, length});
    }
    Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
      return network_.Wait(rank_, tickets, deadline);
    }
    void Abort(const Status&) override {}

   private:
    VirtualNetwork& network_;
    const int rank_;
  };

  Rank& At(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  const Rank& At(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

  Ticket Send(int rank, int peer, ConstBytes data) {
    Rank& self = At(rank);
    const bool local = hosts_[static_cast<size_t>(rank)] == hosts_[static_cast<size_t>(peer)];
    const double bytes = static_cast<double>(data.size()) * (data.size() > unscaled_ ? scale_ : 1);
    Rank& receiver = At(peer);
    const double line = bytes * (local ? costs_.per_byte_in_host : costs_.per_byte);
    const double sending = line * (local ? 1 : self.slowness);
    const double receiving = line * (local ? 1 : receiver.slowness);
    self.own.now += costs_.per_message;
    self.sending_until = std::max(self.own.now, self.sending_until) + sending;
    ++self.own.messages;
    self.own.bytes += static_cast<size_t>(bytes);
    const Ticket ticket = ++self.last;
    const bool buffered = bytes <= static_cast<double>(costs_.buffered);
    self.sends[ticket] = buffered ? self.own.now : self.sending_until;
    const double latency = local ? costs_.latency_in_host : costs_.latency;
    Message message{{}, self.sending_until, latency, sending, receiving};
    if (!data.empty()) message.content.assign(data.data(), data.data() + data.size());
    const std::lock_guard<std::mutex> lock(receiver.mutex);
    receiver.inbox[rank].push_back(std::move(message));
    receiver.changed.notify_all();
    return ticket;
  }

  Ticket Post(int rank, const Receive& receive) {
    Rank& self = At(rank);
    const Ticket ticket = ++self.last;
    self.receives.emplace(ticket, receive);
    return ticket;
  }

  Status Wait(int rank, Span<const Ticket> tickets, Deadline deadline) {
    Rank& self = At(rank);
    std::vector<Message> arrived;
    for (const Ticket ticket : tickets) {
      if (const auto send = self.sends.find(ticket); send != self.sends.end()) {
        self.own.now = std::max(self.own.now, send->second);
        self.sends.erase(send);
      }
      const auto receive = self.receives.find(ticket);
      if (receive == self.receives.end()) continue;
      Result<Message> message = Take(self, receive->second, deadline);
      SHVD_TRY(message.status());
      arrived.push_back(std::move(message).value());
      self.receives.erase(receive);
    }
    const auto earlier = [](const Message& left, const Message& right) {
      return left.sent + left.latency < right.sent + right.latency;
    };
    std::stable_sort(arrived.begin(), arrived.end(), earlier);
    for (const Message& message : arrived) {
      const double ends = message.sent + message.latency;  // if the receiver's line is free
      const double begins = std::max(self.receiving_until, ends - message.sending);
      self.receiving_until = std::max(begins + message.receiving, ends);
      self.own.now = std::max(self.own.now, self.receiving_until) + costs_.per_message;
    }
    return Status();
  }

  static Result<Message> Take(Rank& self, const Receive& receive, Deadline deadline) {
    std::unique_lock<std::mutex> lock(self.mutex);
    std::deque<Message>& queue = self.inbox[receive.peer];
    if (!self.changed.wait_until(lock, deadline.at(), [&] { return !queue.empty(); })) {
      return Status(StatusCode::kTimeout, "no message from rank " + std::to_string(receive.peer));
    }
    Message message = std::move(queue.front());
    queue.pop_front();
    const size_t length = message.content.size();
    if (receive.length == nullptr ? length != receive.target.size()
                                  : length > receive.target.size()) {
      return Status(StatusCode::kInternal, "a message of another length");
    }
    if (length > 0) std::memcpy(receive.target.data(), message.content.data(), length);
    if (receive.length != nullptr) *receive.length = length;
    message.content.clear();
    return message;
  }

  const std::vector<int> hosts_;
  const NetworkCosts costs_;
  const double scale_;
  const size_t unscaled_;
  std::deque<Rank> ranks_;
};

}  // namespace sparkhvd
