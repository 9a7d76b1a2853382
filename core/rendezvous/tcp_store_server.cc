#include "rendezvous/tcp_store_server.h"

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "rendezvous/store_frames.h"

namespace sparkhvd {

// A connection carries one request at a time: a client thread that waits for a key has its own
// connection and does not block other threads.
class TcpStoreServer::Handler final : public FrameHandler {
 public:
  explicit Handler(InProcessStore& values) : values_(values) {}

  bool OnFrame(FrameServer& server, uint64_t connection, std::string frame) override {
    requests_.fetch_add(1, std::memory_order_relaxed);
    auto request = DecodeStoreRequest(AsBytes(frame));
    if (!request.ok() || waiting_.count(connection) > 0) {
      server.Drop(connection);
      return false;
    }
    auto& [kind, key, value] = request.value();
    if (kind == StoreRequestKind::kGet || kind == StoreRequestKind::kGetAll) {
      const auto [entry, is_new] = questions_.try_emplace(std::move(frame));
      Question& question = entry->second;
      if (is_new) {
        question.key = std::move(key);
        if (kind == StoreRequestKind::kGetAll) {
          question.numbers = Numbers{DecodeNumberRange(AsBytes(value)).value(), ""};
        }
      }
      question.connections.insert(connection);
      waiting_[connection] = entry;
      return true;
    }
    if (kind == StoreRequestKind::kMissing) {
      const NumberRange numbers = DecodeNumberRange(AsBytes(value)).value();
      server.Send(connection, std::make_shared<const std::string>(MissingOf(key, numbers)));
      return true;
    }
    if (kind == StoreRequestKind::kWill) {
      wills_[connection] = std::move(request).value();
    } else {
      // Fails only while the server closes, and then this connection ends, too.
      (void)values_.Set(key, value, Deadline::AfterSeconds(0));
    }
    server.Send(connection, std::make_shared<const std::string>());
    return true;
  }

  // Carries out the client's will.
  void OnEnd(FrameServer& server, uint64_t connection, const Status&) override {
    const auto waiting = waiting_.find(connection);
    if (waiting != waiting_.end()) {
      const Questions::iterator question = waiting->second;
      question->second.connections.erase(connection);
      if (question->second.connections.empty()) questions_.erase(question);
      waiting_.erase(waiting);
    }
    const auto will = wills_.find(connection);
    if (will == wills_.end()) return;
    const StoreRequest& set = will->second;
    if (!set.value.empty()) (void)values_.Set(set.key, set.value, Deadline::AfterSeconds(0));
    wills_.erase(will);
    server.Wake();
  }

  void OnTurn(FrameServer& server) override {
    for (auto entry = questions_.begin(); entry != questions_.end();) {
      auto answer = Answer(&entry->second);
      if (!answer) {
        ++entry;
        continue;
      }
      const auto shared = std::make_shared<const std::string>(*std::move(answer));
      std::set<uint64_t>& connections = entry->second.connections;
      while (!connections.empty()) {
        const uint64_t connection = *connections.begin();
        server.Send(connection, shared);
        waiting_.erase(connection);
        connections.erase(connection);
      }
      entry = questions_.erase(entry);
    }
  }

  uint64_t requests() const { return requests_.load(std::memory_order_relaxed); }

 private:
  struct Numbers {
    NumberRange rest;  // the numbers whose values are not in the answer yet
    std::string answer;
  };

  // A waiting Get or GetAll. All ranks of a job ask for the same keys, so the server builds one
  // answer for all of them.
  struct Question {
    std::string key;  // a prefix if there are numbers
    std::optional<Numbers> numbers;
    std::set<uint64_t> connections;
  };
  using Questions = std::map<std::string, Question>;  // by the frame of the request

  // Returns nothing while the answer has room for a value whose key is not set.
  std::optional<std::string> Answer(Question* question) const {
    if (!question->numbers) return values_.Find(question->key);
    auto& [rest, answer] = *question->numbers;
    for (; rest.first < rest.end; ++rest.first) {
      const auto value = values_.Find(question->key + std::to_string(rest.first));
      if (!value) return std::nullopt;
      if (!AppendToAnswer(&answer, *value)) break;
    }
    return std::move(answer);
  }

  std::string MissingOf(const std::string& prefix, NumberRange numbers) const {
    std::string answer;
    for (uint32_t number = numbers.first; number < numbers.end; ++number) {
      if (!values_.Find(prefix + std::to_string(number))) AppendToMissing(&answer, number);
    }
    return answer;
  }

  InProcessStore& values_;
  std::atomic<uint64_t> requests_{0};
  Questions questions_;
  std::map<uint64_t, Questions::iterator> waiting_;  // by connection
  std::map<uint64_t, StoreRequest> wills_;
};

TcpStoreServer::TcpStoreServer() : handler_(std::make_unique<Handler>(values_)) {}

Result<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Start(const HostPort& address,
                                                              const std::string& token,
                                                              ReceptionLimits limits,
                                                              bool encrypt) {
  FrameServerOptions options;
  options.address = address;
  options.token = token;
  options.purpose = kStorePurpose;
  options.encrypt = encrypt;
  options.reception = limits;
  options.frames = kStoreLimits;
  options.thread_name = "shvd-rendezvous";
  std::unique_ptr<TcpStoreServer> store(new TcpStoreServer);
  auto server = FrameServer::Start(std::move(options), *store->handler_);
  if (!server.ok()) return server.status().Annotate("rendezvous server");
  store->server_ = std::move(server).value();
  return store;
}

TcpStoreServer::~TcpStoreServer() { Close(); }

Status TcpStoreServer::Set(const std::string& key, const std::string& value, Deadline deadline) {
  SHVD_TRY(CheckStoreSizes(key, value.size()));
  SHVD_TRY(values_.Set(key, value, deadline));
  server_->Wake();
  return Status();
}

Result<std::string> TcpStoreServer::Get(const std::string& key, Deadline deadline) {
  return values_.Get(key, deadline);
}

uint64_t TcpStoreServer::requests() const { return handler_->requests(); }

void TcpStoreServer::Close() {
  if (!server_) return;
  if (!server_->InChild()) {
    values_.Close(Status(StatusCode::kPeerLost,
                         "the rendezvous server at " + ToText(address()) + " was closed"));
  }
  server_->Close();
}

}  // namespace sparkhvd
