#include "rendezvous/frame_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/io_status.h"

namespace sparkhvd {
namespace {

constexpr size_t kThreadNameBytes = 15;

}  // namespace

struct FrameServer::Session {
  explicit Session(FrameConnection framed) : connection(std::move(framed)) {}

  short events() const {
    if (connection.HasOutput()) return POLLOUT;
    return paused ? short{0} : short{POLLIN};
  }
  // Returns -1, which poll ignores, if the connection ended while the handler had a frame of it.
  // Otherwise, poll would report the end again and again.
  int fd() const { return muted ? -1 : connection.fd(); }

  // Fails if the peer's host is lost, or if the peer does not send or read in time.
  Status CheckPeer(std::chrono::milliseconds host_timeout) {
    if (host.IsSilent(connection.fd(), host_timeout)) {
      return Status(StatusCode::kPeerLost, kSilentHost, ETIMEDOUT);
    }
    if (connection.HasOutput()) {
      return answer.Expired()
                 ? Status(StatusCode::kTimeout, "the peer did not read an answer in time")
                 : Status();
    }
    if (connection.IsFrameLate()) {
      return Status(StatusCode::kTimeout, "only part of a frame arrived in time");
    }
    if (!connection.IsInFrame() && idle.Expired()) {
      return Status(StatusCode::kTimeout, "the peer sent nothing for too long");
    }
    return Status();
  }

  FrameConnection connection;
  HostWatch host;
  Status failure;       // not OK: the server ends the connection
  bool paused = false;  // the handler has a frame; true until Resume
  bool muted = false;   // the connection ended while it was paused
  Deadline idle = Deadline::Never();
  Deadline answer = Deadline::Never();
};

Result<std::unique_ptr<FrameServer>> FrameServer::Start(FrameServerOptions options,
                                                        FrameHandler& handler) {
  if (options.token.empty()) {
    return Status(StatusCode::kInvalidArgument, "a server needs the job's token");
  }
  if (options.encrypt) {
    SHVD_TRY(FrameProtection::Make(Digest(), true, LinkCipher::Use::kSeal).status());
  }
  auto listener = ListenTcp(options.address);
  if (!listener.ok()) return listener.status();
  auto bound = LocalAddress(listener.value().get());
  if (!bound.ok()) return bound.status();
  UniqueFd wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return IoStatus("eventfd", errno);
  std::vector<UniqueFd> listeners;
  listeners.push_back(std::move(listener).value());
  Reception reception(std::move(listeners), options.token, options.purpose, options.reception,
                      options.encrypt);
  const std::string name = options.thread_name.substr(0, kThreadNameBytes);
  std::unique_ptr<FrameServer> server(
      new FrameServer(std::move(options), handler, bound.value(), std::move(wake)));
  try {
    server->thread_ = std::thread([loop = server.get(), owned = std::move(reception)]() mutable {
      loop->Serve(std::move(owned));
    });
  } catch (const std::system_error& error) {  // std::thread reports a failure with this exception
    return Status(StatusCode::kIo, std::string("start the server's thread: ") + error.what());
  }
  (void)::pthread_setname_np(server->thread_.native_handle(), name.c_str());
  return server;
}

FrameServer::FrameServer(FrameServerOptions options, FrameHandler& handler, HostPort address,
                         UniqueFd wake)
    : options_(std::move(options)),
      handler_(handler),
      address_(std::move(address)),
      wake_(std::move(wake)) {}

FrameServer::~FrameServer() { Close(); }

void FrameServer::Send(uint64_t connection, std::shared_ptr<const std::string> payload,
                       std::string head) {
  Enqueue({Command::Kind::kSend, connection, std::move(payload), 0, std::move(head)});
}

void FrameServer::Resume(uint64_t connection, double idle_seconds) {
  Enqueue({Command::Kind::kResume, connection, nullptr, idle_seconds});
}

void FrameServer::Drop(uint64_t connection) { Enqueue({Command::Kind::kDrop, connection}); }

void FrameServer::Wake() { Enqueue({Command::Kind::kWake}); }

void FrameServer::Enqueue(Command command) {
  const std::lock_guard<std::mutex> lock(mutex_);
  commands_.push_back(std::move(command));
  const uint64_t one = 1;
  if (std::exchange(polling_, false) && wake_.valid())
    (void)!::write(wake_.get(), &one, sizeof(one));
}

void FrameServer::Close(double seconds) {
  if (guard_.InChild()) {
    if (thread_.joinable()) thread_.detach();  // a forked child has no such thread
    return;
  }
  if (!thread_.joinable()) return;
  const Deadline deadline = Deadline::AfterSeconds(seconds);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    draining_ = true;
  }
  Wake();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    drained_.wait_until(lock, deadline.at(), [this] { return empty_; });
    closing_ = true;
  }
  Wake();
  thread_.join();
  const std::lock_guard<std::mutex> lock(mutex_);
  wake_.Reset();
}

int FrameServer::Poll(std::vector<pollfd>& fds, const Sessions& sessions,
                      const Reception* reception) {
  fds.clear();
  fds.push_back({wake_.get(), POLLIN, 0});
  for (const auto& [connection, session] : sessions) {
    fds.push_back({session.fd(), session.events(), 0});
  }
  int timeout = static_cast<int>(check_interval_.count());
  if (reception != nullptr) {
    reception->AppendPollFds(fds);
    timeout = reception->TimeoutMillis(timeout);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    polling_ = commands_.empty();
    if (!polling_) timeout = 0;
  }
  const int ready = ::poll(fds.data(), fds.size(), timeout);
  const std::lock_guard<std::mutex> lock(mutex_);
  polling_ = false;
  uint64_t count = 0;
  if (ready > 0 && fds[0].revents != 0) (void)!::read(wake_.get(), &count, sizeof(count));
  return ready;
}

void FrameServer::Serve(Reception owned) {
  std::optional<Reception> reception(std::move(owned));
  Sessions sessions;
  std::vector<pollfd> fds;
  uint64_t last = 0;
  bool warned = false;
  Deadline next_check = Deadline::After(check_interval_);
  while (true) {
    const bool polled = Poll(fds, sessions, reception ? &*reception : nullptr) > 0;
    const bool checks = next_check.Expired();
    if (checks) next_check = Deadline::After(check_interval_);
    size_t index = 1;
    for (auto& [connection, session] : sessions) {
      const short ready = polled ? fds[index].revents : short{0};
      ++index;
      const bool watched = checks && !session.paused;
      if (ready == 0 && !watched) continue;
      // A session that runs out of memory ends. The others continue.
      session.failure = Guarded([&, id = connection, &client = session] {
        if (ready != 0) Advance(id, client, ready);
        SHVD_TRY(client.failure);
        return watched ? client.CheckPeer(options_.host_timeout) : Status();
      });
    }
    static_cast<void>(Guarded([&] {
      handler_.OnTurn(*this);
      return Status();
    }));
    if (reception) {
      for (Admitted& admitted : reception->Serve()) {
        LimitSilence(admitted.fd.get(), options_.host_timeout);
        auto framed = FrameConnection::Make(std::move(admitted.fd), admitted.keys, Side::kAcceptor,
                                            options_.frames);
        if (framed.ok()) sessions.emplace(++last, Session(std::move(framed).value()));
      }
      if (reception->out_of_descriptors() && !std::exchange(warned, true)) {
        handler_.OnOutOfDescriptors();
      }
    }
    if (!RunCommands(sessions)) return;
    EndFailed(sessions);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!draining_) continue;
    if (reception) {
      reception.reset();
      for (auto& [connection, session] : sessions) {
        // The server still reads data that has already arrived.
        (void)::shutdown(session.connection.fd(), SHUT_RD);
      }
    }
    empty_ = sessions.empty();
    if (empty_) drained_.notify_all();
  }
}

void FrameServer::Advance(uint64_t connection, Session& session, short ready) {
  if (session.connection.HasOutput()) {
    session.failure = session.connection.Flush();
  } else if (session.paused) {
    session.muted = (ready & (POLLERR | POLLHUP)) != 0;
  } else {
    auto frame = session.connection.Read();
    session.failure = frame.status();
    if (!frame.ok() || !frame.value()) return;
    session.idle = Deadline::Never();
    session.paused = !handler_.OnFrame(*this, connection, *std::move(frame).value());
  }
}

// Returns false when the server closes.
bool FrameServer::RunCommands(Sessions& sessions) {
  std::vector<Command> commands;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return false;
    commands.swap(commands_);
  }
  for (const Command& command : commands) {
    const auto found = sessions.find(command.connection);
    if (found == sessions.end() || !found->second.failure.ok()) continue;
    static_cast<void>(Guarded([&] {
      Run(command, found->second);
      return Status();
    }));
  }
  return true;
}

void FrameServer::Run(const Command& command, Session& session) {
  switch (command.kind) {
    case Command::Kind::kSend:
      if (!session.connection.HasOutput()) {
        session.answer = Deadline::AfterSeconds(options_.answer_seconds);
      }
      session.failure = session.connection.Queue(AsBytes(command.head), AsBytes(*command.payload));
      if (session.failure.ok()) session.failure = session.connection.Flush();
      session.muted = false;
      return;
    case Command::Kind::kResume:
      session.paused = session.muted = false;
      session.idle = Deadline::AfterSeconds(command.idle_seconds);
      return;
    case Command::Kind::kDrop:
      session.failure = Status(StatusCode::kAborted, "the server closed the connection");
      return;
    case Command::Kind::kWake:
      return;
  }
}

void FrameServer::EndFailed(Sessions& sessions) {
  for (auto entry = sessions.begin(); entry != sessions.end();) {
    if (entry->second.failure.ok()) {
      ++entry;
      continue;
    }
    const uint64_t connection = entry->first;
    const Status why = std::move(entry->second.failure);
    entry = sessions.erase(entry);
    handler_.OnEnd(*this, connection, why);
  }
}

}  // namespace sparkhvd
