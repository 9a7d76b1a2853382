#include "rendezvous/tcp_store_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "rendezvous/dial.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {
namespace {

constexpr ptrdiff_t kMostUnawaited = 8;  // requests whose calls have timed out

// Limits steps that do not depend on other ranks, whatever the caller's deadline.
constexpr double kAnswerSeconds = 10.0;

bool Waits(StoreRequestKind kind) {
  return kind == StoreRequestKind::kGet || kind == StoreRequestKind::kGetAll;
}

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

class TcpStoreClient::ConnectedWill final : public Will {
 public:
  ConnectedWill(TcpStoreClient& client, std::shared_ptr<Line> line, uint32_t number,
                StoreRequest will)
      : client_(client), line_(std::move(line)), number_(number), will_(std::move(will)) {}

  ~ConnectedWill() override {
    if (withdrawn_ || client_.guard_.InChild()) return;
    const std::lock_guard<std::mutex> lock(client_.mutex_);
    client_.Send(*line_, EncodeStoreRequest({StoreRequestKind::kSet, will_.key, will_.value}));
    client_.Withdraw(*line_, number_);
  }

  void Withdraw() override {
    if (std::exchange(withdrawn_, true) || client_.guard_.InChild()) return;
    const StoreRequest request{StoreRequestKind::kWithdraw, "", EncodeRequestNumber(number_)};
    (void)client_.AskOn(*line_, request, Deadline::AfterSeconds(kAnswerSeconds));
  }

 private:
  TcpStoreClient& client_;
  const std::shared_ptr<Line> line_;
  const uint32_t number_;
  const StoreRequest will_;
  bool withdrawn_ = false;
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
      require_encryption_(require_encryption),
      line_(std::make_shared<Line>(std::move(first))) {}

TcpStoreClient::~TcpStoreClient() {
  Close();
  // In a forked child, its destruction would wait for the parent's threads.
  if (guard_.InChild()) static_cast<void>(changed_.release());
}

Status TcpStoreClient::Set(const std::string& key, const std::string& value, Deadline deadline) {
  return Ask({StoreRequestKind::kSet, key, value}, deadline).status();
}

Result<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  return Ask({StoreRequestKind::kGet, key, ""}, deadline);
}

Result<std::vector<std::string>> TcpStoreClient::GetAll(const std::string& prefix,
                                                        NumberRange numbers, Deadline deadline) {
  std::vector<std::string> values;
  for (NumberRange rest = numbers; rest.first < rest.end;) {
    auto answer = Ask({StoreRequestKind::kGetAll, prefix, EncodeNumberRange(rest)}, deadline);
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
    auto answer = Ask({StoreRequestKind::kMissing, prefix, EncodeNumberRange(part)}, deadline);
    if (!answer.ok()) return answer.status();
    auto decoded = DecodeMissing(AsBytes(answer.value()));
    if (!decoded.ok()) return Explain(decoded.status(), prefix, StoreRequestKind::kMissing);
    missing.insert(missing.end(), decoded.value().begin(), decoded.value().end());
    rest.first = part.end;
  }
  return missing;
}

Result<std::unique_ptr<Will>> TcpStoreClient::LeaveWill(const std::string& key,
                                                        const std::string& value,
                                                        Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  const StoreRequest will{StoreRequestKind::kWill, key, value};
  const auto line = Connected(deadline);
  if (!line.ok()) return Explain(line.status(), key, will.kind);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto request = Post(*line.value(), will);
  const uint32_t number = request->first;
  const Status status = AwaitAnswer(lock, *line.value(), request->second, deadline);
  line.value()->pending.erase(request);
  if (status.ok()) {
    return std::unique_ptr<Will>(
        std::make_unique<ConnectedWill>(*this, line.value(), number, will));
  }
  Withdraw(*line.value(), number);
  lock.unlock();
  return Explain(status, key, will.kind);
}

void TcpStoreClient::StopAsking(const std::string& key) {
  if (guard_.InChild()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!line_) return;
  const std::shared_ptr<Line> line = line_;
  for (auto request = line->pending.begin(); request != line->pending.end();) {
    const bool forgets = !request->second.awaited && request->second.key == key;
    request = forgets ? Forget(*line, request) : std::next(request);
  }
}

void TcpStoreClient::Close() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (guard_.InChild()) {
    // If a thread of the parent held the mutex at the fork, nothing in this process can unlock it,
    // and the copy of the connection stays open.
    if (!lock.try_lock()) return;
    if (line_) line_->connection.Close();
  } else {
    lock.lock();
    if (line_) Fail(*line_, Status(StatusCode::kShutDown, "closed"));
  }
  closed_ = true;
  line_.reset();
}

Result<std::shared_ptr<TcpStoreClient::Line>> TcpStoreClient::Connected(Deadline deadline) {
  const Status closed(StatusCode::kShutDown, "closed");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return closed;
    if (line_) return line_;
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
  if (!connection.ok()) return connection.status();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return closed;
  if (!line_) line_ = std::make_shared<Line>(std::move(connection).value());
  return line_;
}

Result<std::string> TcpStoreClient::Ask(const StoreRequest& request, Deadline deadline) {
  if (guard_.InChild()) return Status(StatusCode::kShutDown, kForked);
  SHVD_TRY(CheckStoreSizes(request.key, request.value.size()));
  // Sends the request of a Get even after the deadline, so that a later call can take the answer.
  const bool expired = Waits(request.kind) && deadline.Expired();
  const auto line = Connected(expired ? Deadline::AfterSeconds(kAnswerSeconds) : deadline);
  if (!line.ok()) return Explain(line.status(), request.key, request.kind);
  auto answer = AskOn(*line.value(), request, deadline);
  if (!answer.ok()) return Explain(answer.status(), request.key, request.kind);
  return answer;
}

Result<std::string> TcpStoreClient::AskOn(Line& line, const StoreRequest& request,
                                          Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto posted = Post(line, request);
  const Status status = AwaitAnswer(lock, line, posted->second, deadline);
  if (status.code() == StatusCode::kTimeout && Waits(request.kind)) {
    posted->second.awaited = false;
    const auto unawaited = [](const auto& entry) { return !entry.second.awaited; };
    if (std::count_if(line.pending.begin(), line.pending.end(), unawaited) > kMostUnawaited) {
      Forget(line, std::find_if(line.pending.begin(), line.pending.end(), unawaited));
    }
    return status;
  }
  std::optional<std::string> answer = std::move(posted->second.answer);
  line.pending.erase(posted);
  SHVD_TRY(status);
  return *std::move(answer);
}

uint32_t TcpStoreClient::Send(Line& line, const std::string& encoded) {
  const uint32_t number = ++line.last;
  if (!line.failure.ok()) return number;
  Status sent = line.connection.Queue(AsBytes(EncodeRequestNumber(number)), AsBytes(encoded));
  if (sent.ok()) sent = line.connection.Flush();
  if (!sent.ok()) Fail(line, sent);
  return number;
}

// Sends the request, unless an earlier call has sent the same and timed out.
TcpStoreClient::PendingRequests::iterator TcpStoreClient::Post(Line& line,
                                                               const StoreRequest& request) {
  std::string encoded = EncodeStoreRequest(request);
  const auto earlier = std::find_if(
      line.pending.begin(), line.pending.end(),
      [&](const auto& entry) { return !entry.second.awaited && entry.second.encoded == encoded; });
  if (earlier != line.pending.end()) {
    earlier->second.awaited = true;
    return earlier;
  }
  const uint32_t number = Send(line, encoded);
  PendingRequest pending{request.key, Waits(request.kind) ? std::move(encoded) : std::string()};
  return line.pending.emplace(number, std::move(pending)).first;
}

// One call receives for all. The others wait for it, and for room for what is still to be sent.
Status TcpStoreClient::AwaitAnswer(std::unique_lock<std::mutex>& lock, Line& line,
                                   const PendingRequest& request, Deadline deadline) {
  while (!request.answer) {
    SHVD_TRY(line.failure);
    const bool receives = !line.receives;
    const bool sends = line.connection.HasOutput();
    Status ready(StatusCode::kTimeout, "no answer before the deadline");
    if (receives || sends) {
      if (receives) line.receives = true;
      lock.unlock();
      const int events = (receives ? POLLIN : 0) | (sends ? POLLOUT : 0);
      ready = AwaitEvents(line.connection.fd(), static_cast<short>(events), deadline);
      lock.lock();
      if (receives) line.receives = false;
      if (ready.ok()) Advance(line);
      changed_->notify_all();
    } else if (changed_->wait_until(lock, deadline.at()) == std::cv_status::no_timeout) {
      continue;
    }
    if (ready.code() == StatusCode::kTimeout) return request.answer ? Status() : ready;
    if (!ready.ok()) Fail(line, ready);
  }
  return Status();
}

void TcpStoreClient::Advance(Line& line) {
  Status status = line.failure;
  if (status.ok()) status = line.connection.Flush();
  while (status.ok()) {
    auto frame = line.connection.Read();
    status = frame.status();
    if (!status.ok() || !frame.value()) break;
    status = Deliver(line, *std::move(frame).value());
  }
  if (!status.ok()) Fail(line, status);
}

Status TcpStoreClient::Deliver(Line& line, std::string frame) {
  const size_t head = std::min(kRequestNumberBytes, frame.size());
  const auto number = DecodeRequestNumber(AsBytes(frame).Sub(0, head));
  SHVD_TRY(number.status());
  const auto request = line.pending.find(number.value());
  if (request == line.pending.end()) return Status();  // nobody waits for it any more
  frame.erase(0, head);
  request->second.answer = std::move(frame);
  return Status();
}

void TcpStoreClient::Withdraw(Line& line, uint32_t number) {
  Send(line, EncodeStoreRequest({StoreRequestKind::kWithdraw, "", EncodeRequestNumber(number)}));
}

// Returns what follows `request`.
TcpStoreClient::PendingRequests::iterator TcpStoreClient::Forget(
    Line& line, PendingRequests::iterator request) {
  if (!request->second.answer) Withdraw(line, request->first);
  return line.pending.erase(request);
}

// The calls in progress close the connection. The shutdown only ends their waits.
void TcpStoreClient::Fail(Line& line, const Status& why) {
  if (!line.failure.ok()) return;
  line.failure = why;
  ::shutdown(line.connection.fd(), SHUT_RDWR);
  if (line_.get() == &line) line_.reset();
  changed_->notify_all();
}

Status TcpStoreClient::Explain(const Status& failure, const std::string& key,
                               StoreRequestKind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return Status(StatusCode::kShutDown, "the rendezvous client was closed");
  const bool waits = Waits(kind);
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
