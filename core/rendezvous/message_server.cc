#include "rendezvous/message_server.h"

#include <utility>

namespace sparkhvd {
namespace {

constexpr double kMessageAnswerSeconds = 30.0;

}  // namespace

Result<std::unique_ptr<MessageServer>> MessageServer::Start(
    const HostPort& address, const std::string& token, bool encrypt, const std::string& thread_name,
    std::chrono::milliseconds host_timeout) {
  FrameServerOptions options;
  options.address = address;
  options.token = token;
  options.purpose = kMessagePurpose;
  options.encrypt = encrypt;
  options.frames = kMessageLimits;
  options.answer_seconds = kMessageAnswerSeconds;
  options.thread_name = thread_name;
  options.host_timeout = host_timeout;
  std::unique_ptr<MessageServer> messages(new MessageServer);
  auto server = FrameServer::Start(std::move(options), *messages);
  if (!server.ok()) return server.status();
  messages->server_ = std::move(server).value();
  return messages;
}

Result<MessageEvent> MessageServer::Next(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, deadline.at(), [this] { return closed_ || !events_.empty(); });
  if (closed_) return Status(StatusCode::kShutDown, "the server was closed");
  if (events_.empty()) return Status(StatusCode::kTimeout, "no message arrived");
  MessageEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void MessageServer::Send(uint64_t connection, std::shared_ptr<const std::string> message) {
  server_->Send(connection, std::move(message));
}

void MessageServer::Resume(uint64_t connection, double idle_seconds) {
  server_->Resume(connection, idle_seconds);
}

void MessageServer::Drop(uint64_t connection) { server_->Drop(connection); }

void MessageServer::Close(double seconds) {
  server_->Close(seconds);
  if (server_->InChild()) return;  // a thread of the parent may have held the mutex at the fork
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool MessageServer::OnFrame(FrameServer&, uint64_t connection, std::string frame) {
  Add({connection, std::move(frame), Status()});
  return false;
}

void MessageServer::OnEnd(FrameServer&, uint64_t connection, const Status& why) {
  Add({connection, std::nullopt, why});
}

void MessageServer::OnOutOfDescriptors() { Add({}); }

void MessageServer::Add(MessageEvent event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
  changed_.notify_one();
}

}  // namespace sparkhvd
