// Accepts connections and admits only those that know the job's token.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "rendezvous/handshake.h"

namespace sparkhvd {

struct ReceptionLimits {
  size_t strangers = 256;          // connections without a proof so far
  double handshake_seconds = 5.0;  // for the whole handshake of one connection
  // The time during which no connection is dropped for another: a handshake among members takes one
  // or two round trips.
  double undisturbed_seconds = 0.1;
};

// A connection whose other side has proved that it knows the token.
struct Admitted {
  UniqueFd fd;
  uint64_t claim;
  SessionKeys keys;
};

// When there is no room for another stranger, the oldest one is dropped if it had its guaranteed
// time; otherwise new connections wait in the kernel's queue. A dropped or slow dialer is asked to
// dial again, so that neither a burst of members nor a flood of strangers keeps a member out.
//
// Owns listening sockets and the handshakes in progress on them. It has no thread: its owner polls
// the descriptors from AppendPollFds together with its own, for at most TimeoutMillis, and then
// calls Serve.
class Reception {
 public:
  // `encrypt` as in AcceptorHandshake.
  Reception(std::vector<UniqueFd> listeners, std::string token, std::string purpose,
            ReceptionLimits limits = {}, bool encrypt = false);

  void AppendPollFds(std::vector<pollfd>& fds) const;
  int TimeoutMillis(int cap) const;
  // Never waits: accepts, reads, answers, drops. Returns the newly admitted connections.
  std::vector<Admitted> Serve();

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
  void AdvanceAll(std::vector<Admitted>& admitted);
  static Verdict Advance(Stranger& stranger);
  static void TurnAway(const Stranger& stranger);

  std::vector<UniqueFd> listeners_;
  std::string token_;
  std::string purpose_;
  ReceptionLimits limits_;
  bool encrypt_;
  std::deque<Stranger> strangers_;  // oldest first
  Deadline resume_accepting_;       // in the future while the process is out of descriptors
};

}  // namespace sparkhvd
