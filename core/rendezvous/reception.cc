#include "rendezvous/reception.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "rendezvous/socket.h"

namespace sparkhvd {
namespace {

// Limits the connections accepted per turn, so that a flood of them does not starve the owner's
// loop.
constexpr int kAcceptsPerTurn = 16;
constexpr double kPauseWithoutDescriptors = 0.1;

}  // namespace

Reception::Reception(std::vector<UniqueFd> listeners, std::string token, std::string purpose,
                     ReceptionLimits limits, bool encrypt)
    : listeners_(std::move(listeners)),
      token_(std::move(token)),
      purpose_(std::move(purpose)),
      limits_(limits),
      encrypt_(encrypt),
      resume_accepting_(Deadline::AfterSeconds(0)) {}

void Reception::AppendPollFds(std::vector<pollfd>& fds) const {
  if (resume_accepting_.Expired() && HasRoom()) {
    for (const UniqueFd& listener : listeners_) fds.push_back({listener.get(), POLLIN, 0});
  }
  for (const Stranger& stranger : strangers_) fds.push_back({stranger.fd.get(), POLLIN, 0});
}

int Reception::TimeoutMillis(int cap) const {
  int timeout = cap;
  if (!resume_accepting_.Expired()) timeout = resume_accepting_.RemainingMillis(timeout);
  if (!strangers_.empty()) timeout = strangers_.front().deadline.RemainingMillis(timeout);
  if (!HasRoom()) timeout = strangers_.front().undisturbed.RemainingMillis(timeout);
  return timeout;
}

bool Reception::HasRoom() const {
  return strangers_.size() < limits_.strangers || strangers_.front().undisturbed.Expired();
}

std::vector<Admitted> Reception::Serve(const BusyFor& busy_for) {
  std::vector<Admitted> admitted;
  AdvanceAll(busy_for, admitted);  // before any unauthenticated connection is dropped
  if (resume_accepting_.Expired()) {
    for (const UniqueFd& listener : listeners_) Accept(listener.get());
  }
  AdvanceAll(busy_for, admitted);
  return admitted;
}

void Reception::AdvanceAll(const BusyFor& busy_for, std::vector<Admitted>& admitted) {
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    const Verdict verdict = Advance(*stranger, busy_for);
    if (verdict == Verdict::kAdmitted) {
      TuneStream(stranger->fd.get());
      admitted.push_back(
          {std::move(stranger->fd), stranger->handshake.claim(), stranger->handshake.keys()});
    }
    stranger = verdict == Verdict::kWaiting ? stranger + 1 : strangers_.erase(stranger);
  }
}

bool Reception::MakeRoom() {
  if (!HasRoom()) return false;
  if (strangers_.size() < limits_.strangers) return true;
  Reject(strangers_.front());
  strangers_.pop_front();
  return true;
}

void Reception::Reject(const Stranger& stranger) {
  // A flood must not delay the owner, so bytes that cannot be sent at once are dropped.
  (void)WriteSome(stranger.fd.get(), stranger.handshake.farewell());
}

void Reception::Accept(int listener) {
  for (int i = 0; i < kAcceptsPerTurn && MakeRoom(); ++i) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EMFILE && AllowMoreDescriptors()) continue;
      const bool exhausted =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      // The listener stays readable until the connection is accepted, so without a pause the
      // owner's loop would spin.
      if (exhausted) {
        out_of_descriptors_ = true;
        resume_accepting_ = Deadline::AfterSeconds(kPauseWithoutDescriptors);
      }
      if (errno == EAGAIN || exhausted) return;
      continue;  // this connection ended before it was accepted
    }
    strangers_.push_back({std::move(fd), AcceptorHandshake(token_, purpose_, encrypt_),
                          Deadline::AfterSeconds(limits_.undisturbed_seconds),
                          Deadline::AfterSeconds(limits_.handshake_seconds)});
  }
}

Reception::Verdict Reception::Advance(Stranger& stranger, const BusyFor& busy_for) {
  if (stranger.deadline.Expired()) {
    Reject(stranger);  // a rank on a slow host needs an answer
    return Verdict::kDropped;
  }
  while (true) {
    const size_t wanted = stranger.handshake.wanted();
    auto count = ReadSome(stranger.fd.get(), Bytes(stranger.buffer.data() + stranger.received,
                                                   wanted - stranger.received));
    if (!count.ok()) return Verdict::kDropped;
    if (count.value() == 0) return Verdict::kWaiting;
    stranger.received += count.value();
    if (stranger.received < wanted) continue;
    stranger.received = 0;
    auto reply = stranger.handshake.Consume(ConstBytes(stranger.buffer.data(), wanted));
    if (!reply.ok()) return Verdict::kDropped;
    if (stranger.handshake.done() && busy_for && busy_for(stranger.handshake.claim())) {
      Reject(stranger);
      return Verdict::kDropped;
    }
    // The answers of a whole handshake fit into the kernel's smallest send buffer.
    auto sent =
        WriteSome(stranger.fd.get(), ConstBytes(reply.value().data(), reply.value().size()));
    if (!sent.ok() || sent.value() != reply.value().size()) return Verdict::kDropped;
    if (stranger.handshake.done()) return Verdict::kAdmitted;
  }
}

}  // namespace sparkhvd
