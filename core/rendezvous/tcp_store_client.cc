#include "rendezvous/tcp_store_client.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/sha256.h"
#include "base/wire.h"
#include "rendezvous/handshake.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {
namespace {

constexpr size_t kIdleConnections = 4;

Result<UniqueFd> Dial(const HostPort& server, const std::string& token, Deadline deadline) {
  auto fd = ConnectTcp(server, deadline);
  if (!fd.ok()) return fd.status();
  SHVD_TRY(DialHandshake(fd.value().get(), token, kStorePurpose, 0, deadline));
  return fd;
}

Status SendRequest(int fd, bool set, const std::string& key, const std::string& value,
                   Deadline deadline) {
  StoreRequestHeader header;
  header.request = set ? StoreRequest::kSet : StoreRequest::kGet;
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

Result<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(
    const std::vector<HostPort>& addresses, const std::string& token, Deadline deadline) {
  if (addresses.empty()) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous client needs an address to dial");
  }
  Status failure;
  std::string tried;
  for (size_t i = 0; i < addresses.size(); ++i) {
    // An address that swallows packets must leave time for those after it.
    const auto share = deadline.Remaining() / static_cast<int64_t>(addresses.size() - i);
    auto fd = Dial(addresses[i], token, Deadline::After(share));
    if (fd.ok()) {
      return std::unique_ptr<TcpStoreClient>(
          new TcpStoreClient(addresses[i], token, std::move(fd).value()));
    }
    tried += (i == 0 ? "" : "; ") + ToText(addresses[i]) + ": " + fd.status().message();
    // Of several failures the refused token is the one to act on.
    if (failure.code() != StatusCode::kAuthentication) failure = fd.status();
  }
  return Status(failure.code(), "no rendezvous server answered at " + tried);
}

TcpStoreClient::TcpStoreClient(HostPort server, std::string token, UniqueFd first)
    : server_(std::move(server)), token_(std::move(token)) {
  idle_.push_back(std::move(first));
}

TcpStoreClient::~TcpStoreClient() { Close(); }

Status TcpStoreClient::Set(const std::string& key, const std::string& value, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  return Exchange(true, key, value, deadline).status();
}

Result<std::string> TcpStoreClient::Get(const std::string& key, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, 0));
  return Exchange(false, key, "", deadline);
}

void TcpStoreClient::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  idle_.clear();
  // The thread that uses a connection closes it; this only ends its wait.
  for (const int fd : busy_) ::shutdown(fd, SHUT_RDWR);
}

Result<std::string> TcpStoreClient::Exchange(bool set, const std::string& key,
                                             const std::string& value, Deadline deadline) {
  auto fd = Take(deadline);
  if (!fd.ok()) return Explain(fd.status(), key, set);
  const Status sent = SendRequest(fd.value().get(), set, key, value, deadline);
  auto answer = sent.ok() ? ReadAnswer(fd.value().get(), deadline) : Result<std::string>(sent);
  GiveBack(std::move(fd).value(), answer.ok());
  if (!answer.ok()) return Explain(answer.status(), key, set);
  return answer;
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
  auto dialed = Dial(server_, token_, deadline);
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
