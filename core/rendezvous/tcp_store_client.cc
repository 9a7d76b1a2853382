#include "rendezvous/tcp_store_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "rendezvous/dial.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {
namespace {

constexpr size_t kIdleConnections = 1;
constexpr size_t kPendingConnections = 8;

// Limits steps that do not depend on other ranks, whatever the caller's deadline: sending a
// request, or receiving an answer that has begun to arrive.
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
  if (dialed.ok()) LimitSilence(dialed.value().get(), kSilentRendezvous);
  return dialed;
}

}  // namespace

Result<std::string> TcpStoreClient::Ask(FrameConnection& connection, const StoreRequest& request,
                                        Deadline deadline) {
  SHVD_TRY(connection.Send(AsBytes(EncodeStoreRequest(request)), deadline));
  return connection.Receive(deadline);
}

class TcpStoreClient::ConnectedWill final : public Will {
 public:
  ConnectedWill(TcpStoreClient& client, FrameConnection connection)
      : client_(client), connection_(std::move(connection)) {}
  ~ConnectedWill() override {
    if (connection_) client_.ReleaseConnection(*std::move(connection_), false);
  }

  void Withdraw() override {
    if (!connection_) return;
    const StoreRequest withdraw = {StoreRequestKind::kWill, "", ""};
    const auto answer = Ask(*connection_, withdraw, Deadline::AfterSeconds(kAnswerSeconds));
    client_.ReleaseConnection(*std::move(connection_), answer.ok());
    connection_.reset();
  }

 private:
  TcpStoreClient& client_;
  std::optional<FrameConnection> connection_;
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
  auto first = FrameConnection::Make(std::move(dialed).value(), keys, Side::kDialer, kStoreLimits);
  if (!first.ok()) return first.status();
  auto server = PeerAddress(first.value().fd());
  if (!server.ok()) return server.status();
  return std::unique_ptr<TcpStoreClient>(
      new TcpStoreClient(server.value(), token, require_encryption, std::move(first).value()));
}

TcpStoreClient::TcpStoreClient(HostPort server, std::string token, bool require_encryption,
                               FrameConnection first)
    : server_(std::move(server)),
      token_(std::move(token)),
      require_encryption_(require_encryption) {
  idle_.push_back(std::move(first));
}

TcpStoreClient::~TcpStoreClient() { Close(); }

Result<std::string> TcpStoreClient::AskNow(const StoreRequest& request, Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(request.key, request.value.size()));
  auto connection = Take(deadline);
  if (!connection.ok()) return Explain(connection.status(), request.key, request.kind);
  auto answer = Ask(connection.value(), request, deadline);
  ReleaseConnection(std::move(connection).value(), answer.ok());
  if (!answer.ok()) return Explain(answer.status(), request.key, request.kind);
  return answer;
}

Status TcpStoreClient::Set(const std::string& key, const std::string& value, Deadline deadline) {
  return AskNow({StoreRequestKind::kSet, key, value}, deadline).status();
}

Result<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  return Await({StoreRequestKind::kGet, key, ""}, deadline);
}

Result<std::vector<std::string>> TcpStoreClient::GetAll(const std::string& prefix,
                                                        NumberRange numbers, Deadline deadline) {
  std::vector<std::string> values;
  for (NumberRange rest = numbers; rest.first < rest.end;) {
    auto answer = Await({StoreRequestKind::kGetAll, prefix, EncodeNumberRange(rest)}, deadline);
    if (!answer.ok()) return answer.status();
    auto decoded = DecodeAnswer(AsBytes(answer.value()));
    if (!decoded.ok()) return Explain(decoded.status(), prefix, StoreRequestKind::kGetAll);
    if (decoded.value().size() > rest.end - rest.first) {
      return Explain(Status(StatusCode::kInternal, "the answer has more values than keys"), prefix,
                     StoreRequestKind::kGetAll);
    }
    rest.first += static_cast<uint32_t>(decoded.value().size());
    std::move(decoded.value().begin(), decoded.value().end(), std::back_inserter(values));
  }
  return values;
}

Result<std::vector<uint32_t>> TcpStoreClient::Missing(const std::string& prefix,
                                                      NumberRange numbers, Deadline deadline) {
  std::vector<uint32_t> missing;
  for (NumberRange rest = numbers; rest.first < rest.end;) {
    const uint32_t count = std::min(rest.end - rest.first, kMostNumbersOfMissing);
    const NumberRange part = {rest.first, rest.first + count};
    auto answer = AskNow({StoreRequestKind::kMissing, prefix, EncodeNumberRange(part)}, deadline);
    if (!answer.ok()) return answer.status();
    auto decoded = DecodeMissing(AsBytes(answer.value()));
    if (!decoded.ok()) return Explain(decoded.status(), prefix, StoreRequestKind::kMissing);
    missing.insert(missing.end(), decoded.value().begin(), decoded.value().end());
    rest.first = part.end;
  }
  return missing;
}

Result<std::string> TcpStoreClient::Await(const StoreRequest& request, Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  const std::string& key = request.key;
  SHVD_TRY(CheckStoreSizes(key, 0));
  const std::string encoded = EncodeStoreRequest(request);
  std::optional<FrameConnection> connection = TakePending(encoded);
  if (!connection) {
    // Sends the request even after the deadline, so that a later call can receive the answer.
    auto taken = Take(deadline.Expired() ? Deadline::AfterSeconds(kAnswerSeconds) : deadline);
    if (!taken.ok()) return Explain(taken.status(), key, request.kind);
    connection.emplace(std::move(taken).value());
    const Status sent = connection->Send(AsBytes(encoded), Deadline::AfterSeconds(kAnswerSeconds));
    if (!sent.ok()) {
      ReleaseConnection(*std::move(connection), false);
      return Explain(sent, key, request.kind);
    }
  }
  const Status answered = AwaitEvents(connection->fd(), POLLIN, deadline);
  if (answered.code() == StatusCode::kTimeout) {
    KeepPending({key, encoded, *std::move(connection)});
    return Explain(answered, key, request.kind);
  }
  auto answer = connection->Receive(Deadline::AfterSeconds(kAnswerSeconds));
  ReleaseConnection(*std::move(connection), answer.ok());
  if (!answer.ok()) return Explain(answer.status(), key, request.kind);
  return answer;
}

Result<std::unique_ptr<Will>> TcpStoreClient::LeaveWill(const std::string& key,
                                                        const std::string& value,
                                                        Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  auto connection = Take(deadline);
  if (!connection.ok()) return Explain(connection.status(), key, StoreRequestKind::kWill);
  const Status status =
      Ask(connection.value(), {StoreRequestKind::kWill, key, value}, deadline).status();
  if (status.ok()) {
    return std::unique_ptr<Will>(
        std::make_unique<ConnectedWill>(*this, std::move(connection).value()));
  }
  ReleaseConnection(std::move(connection).value(), false);
  return Explain(status, key, StoreRequestKind::kWill);
}

void TcpStoreClient::StopAsking(const std::string& key) {
  if (guard_.InChild()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.remove_if([&key](const PendingRequest& pending) { return pending.key == key; });
}

void TcpStoreClient::Close() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (guard_.InChild()) {
    // If a thread of the parent held the mutex at the fork, nothing in this process can unlock it,
    // and the copies of the connections stay open.
    if (!lock.try_lock() || closed_) return;
    for (const int fd : busy_) ::close(fd);
    busy_.clear();
  } else {
    lock.lock();
  }
  closed_ = true;
  idle_.clear();
  pending_.clear();
  // The thread that uses a connection closes it. The shutdown only ends that thread's wait.
  for (const int fd : busy_) ::shutdown(fd, SHUT_RDWR);
}

std::optional<FrameConnection> TcpStoreClient::TakePending(const std::string& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(
      pending_.begin(), pending_.end(),
      [&request](const PendingRequest& pending) { return pending.request == request; });
  if (found == pending_.end()) return std::nullopt;
  FrameConnection connection = std::move(found->connection);
  pending_.erase(found);
  busy_.insert(connection.fd());
  return connection;
}

void TcpStoreClient::KeepPending(PendingRequest pending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(pending.connection.fd());
  if (closed_) return;
  pending_.push_back(std::move(pending));
  if (pending_.size() > kPendingConnections) pending_.pop_front();
}

Result<FrameConnection> TcpStoreClient::Take(Deadline deadline) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Status(StatusCode::kShutDown, "closed");
    if (!idle_.empty()) {
      FrameConnection connection = std::move(idle_.back());
      idle_.pop_back();
      busy_.insert(connection.fd());
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
  auto connection =
      FrameConnection::Make(std::move(dialed).value(), keys, Side::kDialer, kStoreLimits);
  if (!connection.ok()) return connection;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "closed");
  busy_.insert(connection.value().fd());
  return connection;
}

void TcpStoreClient::ReleaseConnection(FrameConnection connection, bool reusable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.erase(connection.fd());
  if (reusable && !closed_ && idle_.size() < kIdleConnections) {
    idle_.push_back(std::move(connection));
  }
}

Status TcpStoreClient::Explain(const Status& failure, const std::string& key,
                               StoreRequestKind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "the rendezvous client was closed");
  const bool waits = kind == StoreRequestKind::kGet || kind == StoreRequestKind::kGetAll;
  if (failure.code() == StatusCode::kTimeout && waits) return MissingKey(key);
  const std::string what = (waits                                ? "get key '"
                            : kind == StoreRequestKind::kMissing ? "look up key '"
                                                                 : "set key '") +
                           key + "'";
  if (failure.code() == StatusCode::kPeerLost) {
    return Status(StatusCode::kPeerLost, what + ": lost the rendezvous server at " +
                                             ToText(server_) + ": " + failure.message());
  }
  return failure.Annotate(what + " at " + ToText(server_));
}

}  // namespace sparkhvd
