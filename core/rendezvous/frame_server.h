// A server of authenticated connections that carry frames, all served by one thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "base/unique_fd.h"
#include "rendezvous/frames.h"
#include "rendezvous/reception.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

struct FrameServerOptions {
  HostPort address;  // port 0 takes any free port
  std::string token;
  std::string purpose;
  bool encrypt = false;
  ReceptionLimits reception;
  FrameLimits frames;
  double answer_seconds = kNoLimit;  // time limit for a peer to accept an answer
  // A connection ends if the other host is silent longer.
  std::chrono::milliseconds host_timeout = kSilentRendezvous;
  std::string thread_name;
};

class FrameServer;

// Consumes the frames of a FrameServer. All calls come from the server's thread and must not wait.
class FrameHandler {
 public:
  virtual ~FrameHandler() = default;
  // Returns whether the server may read the next frame of this connection at once. If not, the
  // server reads it after Resume.
  virtual bool OnFrame(FrameServer& server, uint64_t connection, std::string frame) = 0;
  // The connection has ended, but not because the server was closed.
  virtual void OnEnd(FrameServer& server, uint64_t connection, const Status& why) = 0;
  virtual void OnOutOfDescriptors() {}           // called once
  virtual void OnTurn(FrameServer& server) = 0;  // after frames have arrived, and after Wake
};

// Serves from Start until Close. Send, Resume, Drop and Wake may be called from any thread, and
// ignore connections that have ended.
class FrameServer {
 public:
  // Fails with kIo if `options.encrypt` is set and OpenSSL is missing. `handler` must outlive the
  // server.
  static Result<std::unique_ptr<FrameServer>> Start(FrameServerOptions options,
                                                    FrameHandler& handler);
  FrameServer(const FrameServer&) = delete;
  FrameServer& operator=(const FrameServer&) = delete;
  ~FrameServer();

  const HostPort& address() const { return address_; }
  bool InChild() const { return guard_.InChild(); }

  // Sends an answer: `head`, followed by `payload`, which answers to several connections may share.
  // The server reads no frame of the connection until the whole answer is sent.
  void Send(uint64_t connection, std::shared_ptr<const std::string> payload, std::string head = {});
  // Reads the next frame. The connection ends with kTimeout if no frame begins within
  // `idle_seconds`.
  void Resume(uint64_t connection, double idle_seconds);
  void Drop(uint64_t connection);
  void Wake();

  // Stops accepting, and ends the connections and the thread. For up to `seconds`, frames that have
  // arrived are still handled and answered. A second call is harmless, but two threads must not
  // call it at once. In a forked child, it leaves the parent's server alone.
  void Close(double seconds = 0);

 private:
  struct Command {
    enum class Kind { kSend, kResume, kDrop, kWake };
    Kind kind;
    uint64_t connection = 0;
    std::shared_ptr<const std::string> payload = nullptr;
    double idle_seconds = 0;
    std::string head = {};
  };
  struct Session;
  using Sessions = std::map<uint64_t, Session>;

  FrameServer(FrameServerOptions options, FrameHandler& handler, HostPort address, UniqueFd wake);
  void Serve(Reception reception);
  int Poll(std::vector<pollfd>& fds, const Sessions& sessions, const Reception* reception);
  bool RunCommands(Sessions& sessions);
  void Run(const Command& command, Session& session);
  void Advance(uint64_t connection, Session& session, short ready);
  void EndFailed(Sessions& sessions);
  void Enqueue(Command command);

  const FrameServerOptions options_;
  const std::chrono::milliseconds check_interval_ = HostWatch::Interval(options_.host_timeout);
  FrameHandler& handler_;
  const HostPort address_;
  const ForkGuard guard_;
  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  UniqueFd wake_;     // eventfd that ends a poll, until the thread has ended
  std::condition_variable drained_;
  std::vector<Command> commands_;
  bool polling_ = false;
  bool draining_ = false;
  bool closing_ = false;
  bool empty_ = false;  // all sessions have ended after the start of draining

  std::thread thread_;
};

}  // namespace sparkhvd
