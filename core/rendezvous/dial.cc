#include "rendezvous/dial.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/io_status.h"
#include "base/random.h"
#include "base/span.h"
#include "rendezvous/handshake.h"

namespace sparkhvd {
namespace {

// Each address is dialed this long after the previous one. An address that answers within this time
// is therefore preferred to all later addresses.
constexpr std::chrono::milliseconds kHeadStart(100);
constexpr int kSliceMillis = 100;
// The dialer dials a full listener again after a random pause around this value, which doubles with
// every attempt.
constexpr std::chrono::milliseconds kFirstPause(20);
constexpr std::chrono::milliseconds kLongestPause(1000);

// Returns a time between half and one and a half of `typical`, so that dialers that were dropped
// together do not return together.
std::chrono::nanoseconds WithJitter(std::chrono::nanoseconds typical) {
  std::array<std::byte, 1> random{std::byte{128}};
  (void)FillRandom(Bytes(random.data(), random.size()));  // on failure, the middle
  return typical / 2 + typical * std::to_integer<int>(random[0]) / 255;
}

// An attempt to reach one address, up to an authenticated connection.
class Attempt {
 public:
  Attempt(HostPort address, const DialOptions& options, Deadline start)
      : address_(std::move(address)), options_(options), start_(start) {}

  enum class State { kWaiting, kConnecting, kAwaitingWelcome, kReady, kProving, kDone, kFailed };

  State state() const { return state_; }
  const Status& failure() const { return failure_; }
  const HostPort& address() const { return address_; }
  SessionKeys keys() const { return handshake_->keys(); }
  UniqueFd TakeConnection() { return std::move(fd_); }

  pollfd PollFd() const {
    switch (state_) {
      case State::kConnecting:
        return {fd_.get(), POLLOUT, 0};
      case State::kAwaitingWelcome:
      case State::kProving:
        return {fd_.get(), POLLIN, 0};
      default:
        return {-1, 0, 0};
    }
  }

  bool underway() const { return state_ != State::kWaiting && state_ != State::kFailed; }
  bool connected() const { return underway() && state_ != State::kConnecting; }
  bool answered() const { return handshake_.has_value(); }
  int times_turned_away() const { return times_turned_away_; }

  // Begins the first try at once, because all earlier attempts have failed. Returns false if it has
  // already begun.
  bool BeginNow() {
    if (state_ != State::kWaiting || times_turned_away_ > 0) return false;
    start_ = Deadline::AfterSeconds(0);
    return true;
  }

  int TimeoutMillis(int cap) const {
    return state_ == State::kWaiting ? start_.RemainingMillis(cap) : cap;
  }

  void Advance(short ready) {
    if (state_ == State::kWaiting && start_.Expired()) Begin();
    if (ready == 0 && (state_ != State::kConnecting || !connect_by_.Expired())) return;
    if (ready == 0) {
      // This thread may have been stopped since the caller's poll.
      pollfd now = PollFd();
      if (::poll(&now, 1, 0) <= 0) return Fail(Status(StatusCode::kTimeout, Unanswered()));
    }
    if (state_ == State::kConnecting) FinishConnecting();
    if (state_ == State::kAwaitingWelcome) ReadWelcome();
    if (state_ == State::kProving) ReadAnswer();
  }

  // Sends the proof. Only one attempt at a time does so, because the acceptor keeps one connection.
  void Prove() {
    const Digest proof = handshake_->Prove(welcome_);
    received_ = 0;
    state_ = State::kProving;
    const auto sent = WriteSome(fd_.get(), ConstBytes(proof.data(), proof.size()));
    if (sent.status().code() == StatusCode::kPeerLost) return TryAgain();  // this side was too slow
    if (!sent.ok()) return Fail(sent.status());
    if (sent.value() != proof.size())
      Fail(Status(StatusCode::kIo, "the socket did not accept the whole proof"));
  }

  void Fail(const Status& why) {
    failure_ = why;
    state_ = State::kFailed;
    fd_.Reset();
  }

 private:
  void Begin() {
    auto begun =
        options_.unix_name.empty()
            ? BeginConnectTcp(address_, options_.buffer_bytes)
            : ConnectUnix(options_.unix_name, Deadline::AfterSeconds(0), options_.buffer_bytes);
    if (begun.status().code() == StatusCode::kTimeout) return TryAgain();
    if (!begun.ok()) return Fail(begun.status());
    fd_ = std::move(begun).value();
    if (options_.answer_limit) connect_by_ = Deadline::After(*options_.answer_limit);
    state_ = State::kConnecting;
  }

  std::string Unanswered() const {
    const auto millis = options_.answer_limit->count();
    const std::string limit =
        millis % 1000 == 0 ? std::to_string(millis / 1000) + " s" : std::to_string(millis) + " ms";
    return "no answer within " + limit;
  }

  void TryAgain() {
    fd_.Reset();
    received_ = 0;
    const auto pause = kFirstPause * (1 << std::min(times_turned_away_, 6));
    start_ = Deadline::After(WithJitter(std::min<std::chrono::nanoseconds>(pause, kLongestPause)));
    ++times_turned_away_;
    state_ = State::kWaiting;
  }

  void FinishConnecting() {
    int error = 0;
    socklen_t size = sizeof(error);
    if (::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return Fail(IoStatus("connect", error));
    TuneStream(fd_.get());
    handshake_.emplace(options_.token, options_.purpose, options_.claim);
    auto hello = handshake_->Start();
    if (!hello.ok()) return Fail(hello.status());
    auto sent = WriteSome(fd_.get(), ConstBytes(hello.value().data(), hello.value().size()));
    if (!sent.ok()) return Fail(sent.status());
    if (sent.value() != hello.value().size()) {
      return Fail(Status(StatusCode::kIo, "the socket did not accept the whole hello"));
    }
    state_ = State::kAwaitingWelcome;
  }

  void ReadWelcome() {
    if (!Read(Bytes(welcome_.data(), welcome_.size()))) return;
    if (IsBusyNotice(ConstBytes(welcome_.data(), welcome_.size()))) return TryAgain();
    state_ = State::kReady;
  }

  void ReadAnswer() {
    if (!Read(Bytes(answer_.data(), answer_.size()))) return;
    if (IsBusyNotice(ConstBytes(answer_.data(), answer_.size()))) return TryAgain();
    const Status status = handshake_->Check(answer_);
    if (!status.ok()) return Fail(status);
    if (options_.require_encryption && !keys().encrypt) {
      return Fail(Status(StatusCode::kAuthentication,
                         "the other side does not encrypt, but this side requires it; set "
                         "SPARKHVD_ENCRYPT for both"));
    }
    state_ = State::kDone;
  }

  // Returns true once a whole message has arrived.
  bool Read(Bytes message) {
    while (received_ < message.size()) {
      auto count = ReadSome(fd_.get(), message.Sub(received_, message.size() - received_));
      if (!count.ok()) {
        Fail(count.status().code() == StatusCode::kPeerLost ? HandshakeRefused() : count.status());
        return false;
      }
      if (count.value() == 0) return false;
      received_ += count.value();
    }
    return true;
  }

  HostPort address_;
  const DialOptions& options_;
  Deadline start_;
  Deadline connect_by_ = Deadline::Never();
  State state_ = State::kWaiting;
  UniqueFd fd_;
  std::optional<DialerHandshake> handshake_;
  Welcome welcome_{};
  Digest answer_{};
  size_t received_ = 0;
  int times_turned_away_ = 0;
  Status failure_;
};

using State = Attempt::State;

}  // namespace

class Dialing::Attempts {
 public:
  Attempts(DialOptions options, Deadline deadline)
      : options_(std::move(options)), deadline_(deadline) {
    if (!options_.unix_name.empty()) Add({"@" + options_.unix_name, 0});
    for (size_t i = 0; options_.unix_name.empty() && i < options_.addresses.size(); ++i) {
      // A slow name service must leave time for dialing the addresses.
      const auto share = deadline.Remaining() / static_cast<int64_t>(options_.addresses.size() - i);
      auto numeric = ResolveAll(options_.addresses[i], Deadline::After(share));
      if (!numeric.ok()) {
        Add(options_.addresses[i]).Fail(numeric.status());
        continue;
      }
      for (const HostPort& address : numeric.value()) Add(address);
    }
  }

  void AppendPollFds(std::vector<pollfd>& fds) const {
    for (const Attempt& attempt : attempts_) fds.push_back(attempt.PollFd());
  }

  int TimeoutMillis(int cap) {
    bool trying = false;
    for (const Attempt& attempt : attempts_) trying = trying || attempt.underway();
    for (size_t i = 0; i < attempts_.size() && !trying; ++i) {
      if (attempts_[i].BeginNow()) return 0;
    }
    int timeout = deadline_.RemainingMillis(cap);
    for (const Attempt& attempt : attempts_) timeout = attempt.TimeoutMillis(timeout);
    return timeout;
  }

  std::optional<Result<Connection>> Advance(Span<const pollfd> fds) {
    if (attempts_.empty()) {
      return Status(StatusCode::kInvalidArgument, "dialing needs at least one address");
    }
    for (size_t i = 0; i < attempts_.size(); ++i) attempts_[i].Advance(fds[i].revents);
    for (Attempt& attempt : attempts_) {
      if (attempt.state() != State::kDone) continue;
      const SessionKeys keys = attempt.keys();
      return Connection{attempt.TakeConnection(), keys};
    }
    ProveOne();
    if (!AnyAlive()) return Failure();
    if (deadline_.Expired()) return GiveUp();
    return std::nullopt;
  }

  bool answered() const {
    return std::any_of(attempts_.begin(), attempts_.end(),
                       [](const Attempt& attempt) { return attempt.answered(); });
  }

  size_t size() const { return attempts_.size(); }

 private:
  Attempt& Add(const HostPort& address) {
    const auto index = static_cast<int64_t>(attempts_.size());
    return attempts_.emplace_back(address, options_, Deadline::After(index * kHeadStart));
  }

  void ProveOne() {
    for (const Attempt& attempt : attempts_) {
      if (attempt.state() == State::kProving) return;
    }
    for (Attempt& attempt : attempts_) {
      if (attempt.state() == State::kReady) return attempt.Prove();
    }
  }

  bool AnyAlive() const {
    for (const Attempt& attempt : attempts_) {
      if (attempt.state() != State::kFailed) return true;
    }
    return false;
  }

  Status GiveUp() {
    for (Attempt& attempt : attempts_) {
      if (attempt.state() == State::kFailed) continue;
      std::string how = attempt.connected() ? "connected, but no answer before the deadline"
                                            : "no answer before the deadline";
      if (attempt.times_turned_away() > 0) {
        how += " (tries that found no free slot for a handshake: " +
               std::to_string(attempt.times_turned_away()) + ")";
      }
      attempt.Fail(Status(StatusCode::kTimeout, how));
    }
    return Failure();
  }

  Status Failure() const {
    std::string tried;
    StatusCode code = StatusCode::kIo;
    for (const Attempt& attempt : attempts_) {
      tried += (tried.empty() ? "" : "; ") + ToText(attempt.address()) + ": " +
               attempt.failure().message();
      // Among several failures, report the refused token, because the user can fix that failure.
      if (code != StatusCode::kAuthentication) code = attempt.failure().code();
    }
    return Status(code, tried);
  }

  const DialOptions options_;  // the attempts refer to it
  const Deadline deadline_;
  std::vector<Attempt> attempts_;
};

Dialing::Dialing(DialOptions options, Deadline deadline)
    : attempts_(std::make_unique<Attempts>(std::move(options), deadline)) {}
Dialing::Dialing(Dialing&&) noexcept = default;
Dialing& Dialing::operator=(Dialing&&) noexcept = default;
Dialing::~Dialing() = default;

void Dialing::AppendPollFds(std::vector<pollfd>& fds) {
  first_ = fds.size();
  attempts_->AppendPollFds(fds);
}

int Dialing::TimeoutMillis(int cap) { return attempts_->TimeoutMillis(cap); }

std::optional<Result<Dialing::Connection>> Dialing::Advance(const std::vector<pollfd>& fds) {
  return attempts_->Advance(Span<const pollfd>(fds.data() + first_, attempts_->size()));
}

bool Dialing::answered() const { return attempts_->answered(); }

Result<UniqueFd> Dial(const DialOptions& options, Deadline deadline, SessionKeys* keys) {
  Dialing dialing(options, deadline);
  std::vector<pollfd> fds;
  while (true) {
    fds.clear();
    dialing.AppendPollFds(fds);
    const int ready = ::poll(fds.data(), fds.size(), dialing.TimeoutMillis(kSliceMillis));
    if (ready < 0 && errno != EINTR) return IoStatus("poll", errno);
    if (ready <= 0 && options.check) SHVD_TRY(options.check());
    auto dialed = dialing.Advance(fds);
    if (!dialed) continue;
    if (!dialed->ok()) return dialed->status();
    if (keys != nullptr) *keys = dialed->value().keys;
    return std::move(dialed->value().fd);
  }
}

}  // namespace sparkhvd
