// Accepts connections and admits only those that know the job's token.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "rendezvous/handshake.h"

namespace sparkhvd {

struct ReceptionLimits {
  size_t strangers = 256;          // limit of connections without a proof
  double handshake_seconds = 5.0;  // limit for the whole handshake of one connection
  // A connection is not dropped in favor of another one during this time. A handshake between
  // members takes one or two round trips.
  double undisturbed_seconds = 0.1;
};

// A connection whose dialer has proved that it knows the token.
struct Admitted {
  UniqueFd fd;
  uint64_t claim;
  SessionKeys keys;
};

// If there is no room for another unauthenticated connection, the oldest one is dropped once it has
// had its guaranteed time. Until then, new connections wait in the kernel's queue. A dropped or
// slow dialer is asked to dial again, so neither a burst of members nor a flood of strangers keeps
// a member out.
//
// Owns listening sockets and their handshakes in progress. It has no thread: the owner polls the
// descriptors from AppendPollFds together with its own for at most TimeoutMillis, and then calls
// Serve.
class Reception {
 public:
  // For `encrypt`, see AcceptorHandshake.
  Reception(std::vector<UniqueFd> listeners, std::string token, std::string purpose,
            ReceptionLimits limits = {}, bool encrypt = false);

  void AppendPollFds(std::vector<pollfd>& fds) const;
  int TimeoutMillis(int cap) const;
  // Accepts, reads, answers and drops connections without waiting. Returns the newly admitted ones.
  // A member is asked to dial again if `busy_for` its claim; it may be empty.
  using BusyFor = std::function<bool(uint64_t claim)>;
  std::vector<Admitted> Serve(const BusyFor& busy_for = {});
  // Returns whether Serve has ever failed to accept a connection because no descriptor was free.
  bool out_of_descriptors() const { return out_of_descriptors_; }

 private:
  struct Stranger {
    UniqueFd fd;
    AcceptorHandshake handshake;
    Deadline undisturbed;
    Deadline deadline;
    std::array<std::byte, kHelloBytes> buffer{};
    size_t received = 0;
  };
  enum class Verdict { kWaiting, kAdmitted, kDropped };

  bool HasRoom() const;
  bool MakeRoom();
  void Accept(int listener);
  void AdvanceAll(const BusyFor& busy_for, std::vector<Admitted>& admitted);
  static Verdict Advance(Stranger& stranger, const BusyFor& busy_for);
  static void Reject(const Stranger& stranger);

  std::vector<UniqueFd> listeners_;
  std::string token_;
  std::string purpose_;
  ReceptionLimits limits_;
  bool encrypt_;
  std::deque<Stranger> strangers_;  // oldest first
  bool out_of_descriptors_ = false;
  Deadline resume_accepting_;  // in the future while the process has no free descriptors
};

}  // namespace sparkhvd
