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

// Limits the wait for the rest of an answer that has begun to arrive.
constexpr double kAnswerSeconds = 10.0;

Result<UniqueFd> DialServer(const std::vector<HostPort>& addresses, const std::string& token,
                            bool require_encryption, Deadline deadline, SessionKeys* keys,
                            const std::function<Status()>& check = {}) {
  DialOptions options;
  options.addresses = addresses;
  options.token = token;
  options.purpose = kStorePurpose;
  options.check = check;
  options.require_encryption = require_encryption;
  auto dialed = Dial(options, deadline, keys);
  if (dialed.ok()) NoticeLostHost(dialed.value().get());
  return dialed;
}

}  // namespace

Result<TcpStoreClient::Connection> TcpStoreClient::Connection::Make(UniqueFd fd,
                                                                    const SessionKeys& keys) {
  Connection connection;
  connection.fd = std::move(fd);
  if (keys.encrypt) {
    auto cipher = StoreCipher::Make(keys.from_dialer, keys.from_acceptor);
    if (!cipher.ok()) return cipher.status();
    connection.cipher = std::move(cipher).value();
  }
  return connection;
}

Status TcpStoreClient::Connection::Ask(StoreRequest request, const std::string& key,
                                       const std::string& value, Deadline deadline) {
  StoreRequestHeader header;
  header.request = request;
  header.key_bytes = static_cast<uint32_t>(key.size());
  header.value_bytes = static_cast<uint32_t>(value.size());
  const auto head = EncodeStoreRequest(header);
  const std::string body = key + value;
  std::vector<std::byte> message;
  message.reserve(head.size() + body.size() + 2 * cipher.overhead());
  SHVD_TRY(cipher.Seal(ConstBytes(head.data(), head.size()), &message));
  SHVD_TRY(cipher.Seal(AsBytes(body), &message));
  return WriteExactly(fd.get(), ConstBytes(message.data(), message.size()), deadline);
}

Result<std::string> TcpStoreClient::Connection::Answer(Deadline deadline) {
  std::vector<std::byte> received(kStoreAnswerBytes + cipher.overhead());
  SHVD_TRY(ReadExactly(fd.get(), Bytes(received.data(), received.size()), deadline));
  const auto head = cipher.Open(Bytes(received.data(), received.size()));
  if (!head.ok()) return head.status();
  const auto length = LoadLittleEndian<uint32_t>(head.value().data());
  if (length > kMaxValueBytes) {
    return Status(StatusCode::kInternal, "the answer claims " + std::to_string(length) + " bytes");
  }
  received.resize(length + cipher.overhead());
  SHVD_TRY(ReadExactly(fd.get(), Bytes(received.data(), received.size()), deadline));
  const auto value = cipher.Open(Bytes(received.data(), received.size()));
  if (!value.ok()) return value.status();
  return std::string(reinterpret_cast<const char*>(value.value().data()), length);
}

class TcpStoreClient::ConnectedWill final : public Will {
 public:
  ConnectedWill(TcpStoreClient& client, Connection connection)
      : client_(client), connection_(std::move(connection)) {}
  ~ConnectedWill() override {
    if (connection_.fd.valid()) client_.ReleaseConnection(std::move(connection_), false);
  }

  void Withdraw() override {
    if (!connection_.fd.valid()) return;
    const Deadline deadline = Deadline::AfterSeconds(kAnswerSeconds);
    Status status = connection_.Ask(StoreRequest::kWill, "", "", deadline);
    if (status.ok()) status = connection_.Answer(deadline).status();
    client_.ReleaseConnection(std::move(connection_), status.ok());
  }

 private:
  TcpStoreClient& client_;
  Connection connection_;
};

Result<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    const std::vector<HostPort>& addresses, const std::string& token, Deadline deadline,
    const std::function<Status()>& check, bool require_encryption) {
  if (addresses.empty()) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous client needs an address to dial");
  }
  SessionKeys keys;
  auto dialed = DialServer(addresses, token, require_encryption, deadline, &keys, check);
  if (!dialed.ok()) {
    return Status(dialed.status().code(),
                  "no rendezvous server answered at " + dialed.status().message());
  }
  auto first = Connection::Make(std::move(dialed).value(), keys);
  if (!first.ok()) return first.status();
  auto server = PeerAddress(first.value().fd.get());
  if (!server.ok()) return server.status();
  return std::unique_ptr<TcpStoreClient>(
      new TcpStoreClient(server.value(), token, require_encryption, std::move(first).value()));
}

TcpStoreClient::TcpStoreClient(HostPort server, std::string token, bool require_encryption,
                               Connection first)
    : server_(std::move(server)),
      token_(std::move(token)),
      require_encryption_(require_encryption) {
  idle_.push_back(std::move(first));
}

TcpStoreClient::~TcpStoreClient() { Close(); }

Status TcpStoreClient::Set(const std::string& key, const std::string& value, Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  auto taken = Take(deadline);
  if (!taken.ok()) return Explain(taken.status(), key, true);
  Status status = taken.value().Ask(StoreRequest::kSet, key, value, deadline);
  if (status.ok()) status = taken.value().Answer(deadline).status();
  ReleaseConnection(std::move(taken).value(), status.ok());
  return status.ok() ? status : Explain(status, key, true);
}

Result<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(key, 0));
  std::optional<Connection> connection = TakeAsked(key);
  if (!connection) {
    // The request is sent even if no time is left to wait for the value.
    auto taken = Take(deadline.Expired() ? Deadline::AfterSeconds(kAnswerSeconds) : deadline);
    if (!taken.ok()) return Explain(taken.status(), key, false);
    connection.emplace(std::move(taken).value());
    const Status sent =
        connection->Ask(StoreRequest::kGet, key, "", Deadline::AfterSeconds(kAnswerSeconds));
    if (!sent.ok()) {
      ReleaseConnection(*std::move(connection), false);
      return Explain(sent, key, false);
    }
  }
  const Status answered = AwaitEvents(connection->fd.get(), POLLIN, deadline);
  if (answered.code() == StatusCode::kTimeout) {
    LeaveAsked(key, *std::move(connection));
    return Explain(answered, key, false);
  }
  auto answer = connection->Answer(Deadline::AfterSeconds(kAnswerSeconds));
  ReleaseConnection(*std::move(connection), answer.ok());
  if (!answer.ok()) return Explain(answer.status(), key, false);
  return answer;
}

Result<std::unique_ptr<Will>> TcpStoreClient::LeaveWill(const std::string& key,
                                                        const std::string& value,
                                                        Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  auto taken = Take(deadline);
  if (!taken.ok()) return Explain(taken.status(), key, true);
  Status status = taken.value().Ask(StoreRequest::kWill, key, value, deadline);
  if (status.ok()) status = taken.value().Answer(deadline).status();
  if (status.ok()) {
    return std::unique_ptr<Will>(std::make_unique<ConnectedWill>(*this, std::move(taken).value()));
  }
  ReleaseConnection(std::move(taken).value(), false);
  return Explain(status, key, true);
}

void TcpStoreClient::StopAsking(const std::string& key) {
  if (guard_.InChild()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  asked_.remove_if([&key](const Asked& asked) { return asked.key == key; });
}

void TcpStoreClient::Close() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (guard_.InChild()) {
    // A thread of the parent may have held the mutex at the fork. Then the copies stay open.
    if (!lock.try_lock() || closed_) return;
    for (const int fd : busy_) ::close(fd);
    busy_.clear();
  } else {
    lock.lock();
  }
  closed_ = true;
  idle_.clear();
  asked_.clear();
  // The thread that uses a connection closes it. This call only ends its wait.
  for (const int fd : busy_) ::shutdown(fd, SHUT_RDWR);
}

std::optional<TcpStoreClient::Connection> TcpStoreClient::TakeAsked(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(asked_.begin(), asked_.end(),
                                  [&key](const Asked& asked) { return asked.key == key; });
  if (found == asked_.end()) return std::nullopt;
  Connection connection = std::move(found->connection);
  asked_.erase(found);
  busy_.insert(connection.fd.get());
  return connection;
}

void TcpStoreClient::LeaveAsked(const std::string& key, Connection connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(connection.fd.get());
  if (closed_) return;
  asked_.push_back({key, std::move(connection)});
  if (asked_.size() > kAskedConnections) asked_.pop_front();
}

Result<TcpStoreClient::Connection> TcpStoreClient::Take(Deadline deadline) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Status(StatusCode::kShutDown, "closed");
    if (!idle_.empty()) {
      Connection connection = std::move(idle_.back());
      idle_.pop_back();
      busy_.insert(connection.fd.get());
      return connection;
    }
  }
  SessionKeys keys;
  auto dialed = DialServer({server_}, token_, require_encryption_, deadline, &keys);
  if (!dialed.ok()) {
    // The server answered before, so a failure means that it has ended.
    const bool late = dialed.status().code() == StatusCode::kTimeout;
    return late ? dialed.status() : Status(StatusCode::kPeerLost, dialed.status().message());
  }
  auto connection = Connection::Make(std::move(dialed).value(), keys);
  if (!connection.ok()) return connection;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "closed");
  busy_.insert(connection.value().fd.get());
  return connection;
}

void TcpStoreClient::ReleaseConnection(Connection connection, bool reusable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(connection.fd.get());
  if (reusable && !closed_ && idle_.size() < kIdleConnections) {
    idle_.push_back(std::move(connection));
  }
}

Status TcpStoreClient::Explain(const Status& failure, const std::string& key, bool set) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "the rendezvous client was closed");
  const std::string what = (set ? "set key '" : "get key '") + key + "'";
  if (failure.code() == StatusCode::kPeerLost) {
    return Status(StatusCode::kPeerLost, what + ": lost the rendezvous server at " +
                                             ToText(server_) + ": " + failure.message());
  }
  if (failure.code() == StatusCode::kTimeout && !set) return MissingKey(key);
  return failure.Annotate(what + " at " + ToText(server_));
}

}  // namespace sparkhvd
