#include "rendezvous/tcp_store_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/sha256.h"
#include "base/wire.h"
#include "rendezvous/dial.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {
namespace {

constexpr size_t kIdleConnections = 1;
constexpr size_t kAskedConnections = 8;

// An answer that has begun to come is there in a moment.
constexpr double kAnswerSeconds = 10.0;

Result<UniqueFd> DialServer(const std::vector<HostPort>& addresses, const std::string& token,
                            Deadline deadline, const std::function<Status()>& check = {}) {
  DialOptions options;
  options.addresses = addresses;
  options.token = token;
  options.purpose = kStorePurpose;
  options.check = check;
  auto dialed = Dial(options, deadline);
  if (dialed.ok()) NoticeLostHost(dialed.value().get());
  return dialed;
}

Status SendRequest(int fd, StoreRequest request, const std::string& key, const std::string& value,
                   Deadline deadline) {
  StoreRequestHeader header;
  header.request = request;
  header.key_bytes = static_cast<uint32_t>(key.size());
  header.value_bytes = static_cast<uint32_t>(value.size());
  const auto encoded = EncodeStoreRequest(header);
  SHVD_TRY(WriteExactly(fd, ConstBytes(encoded.data(), encoded.size()), deadline));
  SHVD_TRY(WriteExactly(fd, AsBytes(key), deadline));
  return WriteExactly(fd, AsBytes(value), deadline);
}

Result<std::string> ReadAnswer(int fd, Deadline deadline) {
  std::array<std::byte, kStoreAnswerBytes> head{};
  SHVD_TRY(ReadExactly(fd, Bytes(head.data(), head.size()), deadline));
  const auto length = LoadLittleEndian<uint32_t>(head.data());
  if (length > kMaxValueBytes) {
    return Status(StatusCode::kInternal, "the answer claims " + std::to_string(length) + " bytes");
  }
  std::string value(length, '\0');
  SHVD_TRY(ReadExactly(fd, Bytes(reinterpret_cast<std::byte*>(value.data()), length), deadline));
  return value;
}

}  // namespace

class TcpStoreClient::ConnectedWill final : public Will {
 public:
  ConnectedWill(TcpStoreClient& client, UniqueFd fd) : client_(client), fd_(std::move(fd)) {}
  ~ConnectedWill() override {
    if (fd_.valid()) client_.GiveBack(std::move(fd_), false);
  }

  void Withdraw() override {
    if (!fd_.valid()) return;
    const Deadline deadline = Deadline::AfterSeconds(kAnswerSeconds);
    Status status = SendRequest(fd_.get(), StoreRequest::kWill, "", "", deadline);
    if (status.ok()) status = ReadAnswer(fd_.get(), deadline).status();
    client_.GiveBack(std::move(fd_), status.ok());
  }

 private:
  TcpStoreClient& client_;
  UniqueFd fd_;
};

Result<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    const std::vector<HostPort>& addresses, const std::string& token, Deadline deadline,
    const std::function<Status()>& check) {
  if (addresses.empty()) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous client needs an address to dial");
  }
  auto fd = DialServer(addresses, token, deadline, check);
  if (!fd.ok()) {
    return Status(fd.status().code(), "no rendezvous server answered at " + fd.status().message());
  }
  auto server = PeerAddress(fd.value().get());
  if (!server.ok()) return server.status();
  return std::unique_ptr<TcpStoreClient>(
      new TcpStoreClient(server.value(), token, std::move(fd).value()));
}

TcpStoreClient::TcpStoreClient(HostPort server, std::string token, UniqueFd first)
    : server_(std::move(server)), token_(std::move(token)) {
  idle_.push_back(std::move(first));
}

TcpStoreClient::~TcpStoreClient() { Close(); }

Status TcpStoreClient::Set(const std::string& key, const std::string& value, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  auto fd = Take(deadline);
  if (!fd.ok()) return Explain(fd.status(), key, true);
  Status status = SendRequest(fd.value().get(), StoreRequest::kSet, key, value, deadline);
  if (status.ok()) status = ReadAnswer(fd.value().get(), deadline).status();
  GiveBack(std::move(fd).value(), status.ok());
  return status.ok() ? status : Explain(status, key, true);
}

Result<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, 0));
  UniqueFd fd = TakeAsked(key);
  if (!fd.valid()) {
    // Who has no time to wait for the value still wants to have asked.
    auto taken = Take(deadline.Expired() ? Deadline::AfterSeconds(kAnswerSeconds) : deadline);
    if (!taken.ok()) return Explain(taken.status(), key, false);
    fd = std::move(taken).value();
    const Status sent =
        SendRequest(fd.get(), StoreRequest::kGet, key, "", Deadline::AfterSeconds(kAnswerSeconds));
    if (!sent.ok()) {
      GiveBack(std::move(fd), false);
      return Explain(sent, key, false);
    }
  }
  const Status answered = AwaitEvents(fd.get(), POLLIN, deadline);
  if (answered.code() == StatusCode::kTimeout) {
    LeaveAsked(key, std::move(fd));
    return Explain(answered, key, false);
  }
  auto answer = ReadAnswer(fd.get(), Deadline::AfterSeconds(kAnswerSeconds));
  GiveBack(std::move(fd), answer.ok());
  if (!answer.ok()) return Explain(answer.status(), key, false);
  return answer;
}

Result<std::unique_ptr<Will>> TcpStoreClient::LeaveWill(const std::string& key,
                                                        const std::string& value,
                                                        Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  auto fd = Take(deadline);
  if (!fd.ok()) return Explain(fd.status(), key, true);
  Status status = SendRequest(fd.value().get(), StoreRequest::kWill, key, value, deadline);
  if (status.ok()) status = ReadAnswer(fd.value().get(), deadline).status();
  if (status.ok()) {
    return std::unique_ptr<Will>(std::make_unique<ConnectedWill>(*this, std::move(fd).value()));
  }
  GiveBack(std::move(fd).value(), false);
  return Explain(status, key, true);
}

void TcpStoreClient::StopAsking(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  asked_.remove_if([&key](const Asked& asked) { return asked.key == key; });
}

void TcpStoreClient::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  idle_.clear();
  asked_.clear();
  // The thread that uses a connection closes it; this only ends its wait.
  for (const int fd : busy_) ::shutdown(fd, SHUT_RDWR);
}

UniqueFd TcpStoreClient::TakeAsked(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(asked_.begin(), asked_.end(),
                                  [&key](const Asked& asked) { return asked.key == key; });
  if (found == asked_.end()) return UniqueFd();
  UniqueFd fd = std::move(found->fd);
  asked_.erase(found);
  busy_.insert(fd.get());
  return fd;
}

void TcpStoreClient::LeaveAsked(const std::string& key, UniqueFd fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(fd.get());
  if (closed_) return;
  asked_.push_back({key, std::move(fd)});
  if (asked_.size() > kAskedConnections) asked_.pop_front();
}

Result<UniqueFd> TcpStoreClient::Take(Deadline deadline) {
  UniqueFd fd;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Status(StatusCode::kShutDown, "closed");
    if (!idle_.empty()) {
      fd = std::move(idle_.back());
      idle_.pop_back();
      busy_.insert(fd.get());
      return fd;
    }
  }
  auto dialed = DialServer({server_}, token_, deadline);
  if (!dialed.ok()) {
    // It answered before, so what is missing now is the server.
    const bool late = dialed.status().code() == StatusCode::kTimeout;
    return late ? dialed.status() : Status(StatusCode::kPeerLost, dialed.status().message());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "closed");
  busy_.insert(dialed.value().get());
  return dialed;
}

void TcpStoreClient::GiveBack(UniqueFd fd, bool reusable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(fd.get());
  if (reusable && !closed_ && idle_.size() < kIdleConnections) idle_.push_back(std::move(fd));
}

Status TcpStoreClient::Explain(const Status& failure, const std::string& key, bool set) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "the rendezvous client was closed");
  const std::string what = (set ? "set key '" : "get key '") + key + "'";
  if (failure.code() == StatusCode::kPeerLost) {
    return Status(StatusCode::kPeerLost, what + ": the rendezvous server at " + ToText(server_) +
                                             " is gone: " + failure.message());
  }
  if (failure.code() == StatusCode::kTimeout && !set) return MissingKey(key);
  return failure.Annotate(what + " at " + ToText(server_));
}

}  // namespace sparkhvd
