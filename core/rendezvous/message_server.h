// A server of messages that other threads take and answer.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "rendezvous/frame_server.h"

namespace sparkhvd {

// The purpose of the handshake on a connection for messages.
inline constexpr char kMessagePurpose[] = "messages";
constexpr FrameLimits kMessageLimits = {size_t{1} << 20, 30.0};

// A message, or the end of a connection. Connection 0 means that this process has no descriptor
// left for a new connection; this is reported once.
struct MessageEvent {
  uint64_t connection = 0;
  std::optional<std::string> message;
  Status end;
};

// After each message, its connection is not read until Resume. So a slow handler makes its peers
// wait, and one connection's messages are handled in order.
class MessageServer final : private FrameHandler {
 public:
  static Result<std::unique_ptr<MessageServer>> Start(
      const HostPort& address, const std::string& token, bool encrypt,
      const std::string& thread_name, std::chrono::milliseconds host_timeout = kSilentRendezvous);

  const HostPort& address() const { return server_->address(); }
  // Returns the next event. Fails with kTimeout if there is none before the deadline, and with
  // kShutDown once the server is closed.
  Result<MessageEvent> Next(Deadline deadline);
  // See FrameServer. Thread-safe.
  void Send(uint64_t connection, std::shared_ptr<const std::string> message);
  void Resume(uint64_t connection, double idle_seconds);
  void Drop(uint64_t connection);
  // See FrameServer. Wakes the threads in Next.
  void Close(double seconds);

 private:
  MessageServer() = default;
  bool OnFrame(FrameServer& server, uint64_t connection, std::string frame) override;
  void OnEnd(FrameServer& server, uint64_t connection, const Status& why) override;
  void OnOutOfDescriptors() override;
  void OnTurn(FrameServer&) override {}
  void Add(MessageEvent event);

  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  std::condition_variable changed_;
  std::deque<MessageEvent> events_;
  bool closed_ = false;

  std::unique_ptr<FrameServer> server_;
};

}  // namespace sparkhvd
