#include "rendezvous/tcp_store_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <list>
#include <system_error>
#include <utility>
#include <vector>

#include "base/io_status.h"
#include "base/wire.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {
namespace {

constexpr short kEnds = POLLRDHUP | POLLHUP | POLLERR;

// One authenticated client connection. It carries one request at a time: a client thread that waits
// for a key has its own connection and does not block other threads.
class Session {
 public:
  Session(UniqueFd fd, StoreCipher cipher)
      : fd_(std::move(fd)),
        cipher_(std::move(cipher)),
        head_(kStoreRequestBytes + cipher_.overhead()) {}

  int fd() const { return fd_.get(); }
  bool IsHostSilent() { return host_.IsSilent(fd_.get(), kSilentRendezvous); }

  // Carries out the client's will once the connection has ended.
  void End(InProcessStore& values) const {
    if (!will_.empty()) (void)values.Set(will_key_, will_, Deadline::AfterSeconds(0));
  }

  short events() const {
    switch (state_) {
      case State::kReading:
        return POLLIN;
      case State::kWaiting:
        return POLLRDHUP;  // until the key is set, only the end of the connection matters
      case State::kAnswering:
        return POLLOUT;
    }
    return 0;
  }

  // Does all work that needs no wait. Returns false when the connection is finished. `ready` is the
  // result of poll. Another connection may have set the key that this one waits for.
  bool Advance(InProcessStore& values, short ready) {
    if (state_ == State::kWaiting && (ready & kEnds) != 0) return false;
    if (state_ != State::kWaiting && ready == 0) return true;
    while (true) {
      bool moved = false;
      switch (state_) {
        case State::kReading:
          if (!Read(values, &moved)) return false;
          break;
        case State::kWaiting:
          if (!Answer(values, &moved)) return false;
          break;
        case State::kAnswering:
          if (!Write(&moved)) return false;
          break;
      }
      if (!moved) return true;
    }
  }

 private:
  enum class State { kReading, kWaiting, kAnswering };

  bool Read(InProcessStore& values, bool* moved) {
    const bool in_header = received_ < head_.size();
    const Bytes target =
        in_header ? Bytes(head_.data(), head_.size()).Sub(received_, head_.size() - received_)
                  : Bytes(body_.data(), body_.size())
                        .Sub(received_ - head_.size(), body_.size() - (received_ - head_.size()));
    auto count = ReadSome(fd_.get(), target);
    if (!count.ok()) return false;
    *moved = count.value() > 0;
    received_ += count.value();
    if (in_header && received_ == head_.size()) {
      auto opened = cipher_.Open(Bytes(head_.data(), head_.size()));
      if (!opened.ok()) return false;
      auto header = DecodeStoreRequest(opened.value());
      if (!header.ok()) return false;
      header_ = header.value();
      body_.resize(header_.key_bytes + header_.value_bytes + cipher_.overhead());
    }
    if (received_ >= head_.size() && received_ == head_.size() + body_.size()) {
      auto opened = cipher_.Open(Bytes(body_.data(), body_.size()));
      if (!opened.ok()) return false;
      *moved = true;
      return Execute(values, opened.value());
    }
    return true;
  }

  bool Execute(InProcessStore& values, ConstBytes body) {
    const auto* text = reinterpret_cast<const char*>(body.data());
    key_.assign(text, header_.key_bytes);
    received_ = 0;
    if (header_.request == StoreRequest::kGet) {
      state_ = State::kWaiting;
      return true;
    }
    std::string value(text + header_.key_bytes, header_.value_bytes);
    if (header_.request == StoreRequest::kWill) {
      will_ = std::move(value);
      will_key_ = key_;
    } else {
      // Fails only while the server closes, and then this connection ends, too.
      (void)values.Set(key_, std::move(value), Deadline::AfterSeconds(0));
    }
    return StartAnswer("");
  }

  // Returns false when the connection is finished.
  bool Answer(const InProcessStore& values, bool* moved) {
    const auto value = values.Find(key_);
    if (!value) return true;
    *moved = true;
    return StartAnswer(*value);
  }

  bool StartAnswer(const std::string& value) {
    std::array<std::byte, kStoreAnswerBytes> head;
    StoreLittleEndian(static_cast<uint32_t>(value.size()), head.data());
    body_.clear();
    body_.reserve(head.size() + value.size() + 2 * cipher_.overhead());
    sent_ = 0;
    state_ = State::kAnswering;
    return cipher_.Seal(ConstBytes(head.data(), head.size()), &body_).ok() &&
           cipher_.Seal(AsBytes(value), &body_).ok();
  }

  bool Write(bool* moved) {
    auto count = WriteSome(fd_.get(), ConstBytes(body_.data() + sent_, body_.size() - sent_));
    if (!count.ok()) return false;
    sent_ += count.value();
    *moved = count.value() > 0;
    if (sent_ == body_.size()) {
      state_ = State::kReading;
      body_ = {};
    }
    return true;
  }

  UniqueFd fd_;
  HostWatch host_;
  StoreCipher cipher_;
  State state_ = State::kReading;
  std::vector<std::byte> head_;
  StoreRequestHeader header_;
  std::string key_;
  std::string will_key_;
  std::string will_;
  std::vector<std::byte> body_;  // body of the request being read or of the answer being sent
  size_t received_ = 0;
  size_t sent_ = 0;
};

constexpr int kPollCapMillis = 1000;
constexpr std::chrono::seconds kCheckInterval(1);  // between checks of the clients' hosts

void DrainWake(int fd) {
  uint64_t count = 0;
  (void)!::read(fd, &count, sizeof(count));
}

}  // namespace

Result<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Start(const HostPort& address,
                                                              const std::string& token,
                                                              ReceptionLimits limits,
                                                              bool encrypt) {
  if (token.empty()) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous server needs the job's token");
  }
  if (encrypt) SHVD_TRY(StoreCipher::Make(Digest(), Digest()).status());
  auto listener = ListenTcp(address);
  if (!listener.ok()) return listener.status().Annotate("rendezvous server");
  auto bound = LocalAddress(listener.value().get());
  if (!bound.ok()) return bound.status().Annotate("rendezvous server");
  UniqueFd wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return IoStatus("eventfd", errno);
  std::vector<UniqueFd> listeners;
  listeners.push_back(std::move(listener).value());
  try {
    return std::unique_ptr<TcpStoreServer>(
        new TcpStoreServer(bound.value(), std::move(wake),
                           Reception(std::move(listeners), token, kStorePurpose, limits, encrypt)));
  } catch (const std::system_error& error) {  // std::thread reports a failure with this exception
    return Status(StatusCode::kIo, std::string("start the rendezvous thread: ") + error.what());
  }
}

TcpStoreServer::TcpStoreServer(HostPort address, UniqueFd wake, Reception reception)
    : address_(std::move(address)), wake_(std::move(wake)) {
  thread_ =
      std::thread([this, owned = std::move(reception)]() mutable { Serve(std::move(owned)); });
  (void)::pthread_setname_np(thread_.native_handle(), "shvd-rendezvous");
}

TcpStoreServer::~TcpStoreServer() { Close(); }

Status TcpStoreServer::Set(const std::string& key, const std::string& value, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  SHVD_TRY(values_.Set(key, value, deadline));
  Ring();
  return Status();
}

Result<std::string> TcpStoreServer::Get(const std::string& key, Deadline deadline) {
  return values_.Get(key, deadline);
}

void TcpStoreServer::Close() {
  if (guard_.InChild()) {
    if (thread_.joinable()) thread_.detach();  // a forked child has no such thread
    return;
  }
  closing_.store(true);
  values_.Close(Status(StatusCode::kPeerLost,
                       "the rendezvous server at " + ToText(address_) + " was closed"));
  Ring();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> lock(wake_mutex_);
  wake_.Reset();
}

void TcpStoreServer::Ring() {
  const std::lock_guard<std::mutex> lock(wake_mutex_);
  const uint64_t one = 1;
  if (wake_.valid()) (void)!::write(wake_.get(), &one, sizeof(one));
}

void TcpStoreServer::Serve(Reception reception) {
  std::list<Session> sessions;
  std::vector<pollfd> fds;
  Deadline next_check = Deadline::After(kCheckInterval);
  while (!closing_.load()) {
    fds.clear();
    fds.push_back({wake_.get(), POLLIN, 0});
    for (const Session& session : sessions) fds.push_back({session.fd(), session.events(), 0});
    reception.AppendPollFds(fds);
    (void)::poll(fds.data(), fds.size(), reception.TimeoutMillis(kPollCapMillis));
    DrainWake(wake_.get());
    const bool checks_hosts = next_check.Expired();
    if (checks_hosts) next_check = Deadline::After(kCheckInterval);
    size_t index = 1;
    bool progressed = false;
    for (auto session = sessions.begin(); session != sessions.end(); ++index) {
      const short events = fds[index].revents;
      progressed = progressed || events != 0;
      bool is_open = false;
      // A session that runs out of memory ends. The others continue.
      static_cast<void>(Guarded([&] {
        is_open = session->Advance(values_, events) && !(checks_hosts && session->IsHostSilent());
        return Status();
      }));
      if (is_open) {
        ++session;
        continue;
      }
      session->End(values_);
      session = sessions.erase(session);
    }
    for (Admitted& admitted : reception.Serve()) {
      StoreCipher cipher;
      if (admitted.keys.encrypt) {
        auto made = StoreCipher::Make(admitted.keys.from_acceptor, admitted.keys.from_dialer);
        if (!made.ok()) continue;  // making the cipher already worked at the start
        cipher = std::move(made).value();
      }
      NoticeLostHost(admitted.fd.get());
      sessions.emplace_back(std::move(admitted.fd), std::move(cipher));
    }
    // An earlier session may wait for a key that a later one has set.
    if (progressed) Ring();
  }
}

}  // namespace sparkhvd
