#include "rendezvous/tcp_store_server.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "rendezvous/store_frames.h"

namespace sparkhvd {

// A connection carries any number of waiting requests, so a client needs only one.
class TcpStoreServer::Handler final : public FrameHandler {
 public:
  explicit Handler(InProcessStore& values) : values_(values) {}

  bool OnFrame(FrameServer& server, uint64_t connection, std::string frame) override {
    const size_t head = std::min(kRequestNumberBytes, frame.size());
    const auto number = DecodeRequestNumber(AsBytes(frame).Sub(0, head));
    auto request = DecodeStoreRequest(AsBytes(frame).Sub(head, frame.size() - head));
    if (!number.ok() || !request.ok() || waiting_.count({connection, number.value()}) > 0) {
      requests_.fetch_add(1, std::memory_order_relaxed);
      server.Drop(connection);
      return false;
    }
    const Asker asker{connection, number.value()};
    auto& [kind, key, value] = request.value();
    if (kind != StoreRequestKind::kWithdraw) requests_.fetch_add(1, std::memory_order_relaxed);
    std::string answer;
    switch (kind) {
      case StoreRequestKind::kGet:
      case StoreRequestKind::kGetAll: {
        const auto [entry, is_new] = questions_.try_emplace(frame.substr(head));
        Question& question = entry->second;
        if (is_new) {
          question.key = std::move(key);
          if (kind == StoreRequestKind::kGetAll) {
            question.numbers = Numbers{DecodeNumberRange(AsBytes(value)).value(), ""};
          }
        }
        question.askers.insert(asker);
        waiting_[asker] = entry;
        return true;
      }
      case StoreRequestKind::kMissing:
        answer = MissingOf(key, DecodeNumberRange(AsBytes(value)).value());
        break;
      case StoreRequestKind::kWill:
        wills_[asker] = std::move(request).value();
        break;
      case StoreRequestKind::kWithdraw: {
        const Asker earlier{connection, DecodeRequestNumber(AsBytes(value)).value()};
        wills_.erase(earlier);
        if (const auto waiting = waiting_.find(earlier); waiting != waiting_.end()) Forget(waiting);
        break;
      }
      case StoreRequestKind::kSet:
        // Fails only while the server closes, and then this connection ends, too.
        (void)values_.Set(key, value, Deadline::AfterSeconds(0));
        break;
    }
    Answer(server, asker, std::make_shared<const std::string>(std::move(answer)));
    return true;
  }

  // Carries out the client's wills.
  void OnEnd(FrameServer& server, uint64_t connection, const Status&) override {
    for (auto waiting = waiting_.lower_bound({connection, 0});
         waiting != waiting_.end() && waiting->first.connection == connection;) {
      waiting = Forget(waiting);
    }
    auto will = wills_.lower_bound({connection, 0});
    if (will == wills_.end() || will->first.connection != connection) return;
    while (will != wills_.end() && will->first.connection == connection) {
      (void)values_.Set(will->second.key, will->second.value, Deadline::AfterSeconds(0));
      will = wills_.erase(will);
    }
    server.Wake();
  }

  void OnTurn(FrameServer& server) override {
    for (auto entry = questions_.begin(); entry != questions_.end();) {
      auto answer = AnswerTo(&entry->second);
      if (!answer) {
        ++entry;
        continue;
      }
      const auto shared = std::make_shared<const std::string>(*std::move(answer));
      std::set<Asker>& askers = entry->second.askers;
      while (!askers.empty()) {
        const Asker asker = *askers.begin();
        Answer(server, asker, shared);
        waiting_.erase(asker);
        askers.erase(asker);
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

  struct Asker {
    uint64_t connection;
    uint32_t number;  // of the request

    bool operator<(const Asker& other) const {
      return std::tie(connection, number) < std::tie(other.connection, other.number);
    }
  };

  // A waiting Get or GetAll. All ranks of a job ask for the same keys, so the server builds one
  // answer for all of them.
  struct Question {
    std::string key;  // a prefix if there are numbers
    std::optional<Numbers> numbers;
    std::set<Asker> askers;
  };
  using Questions = std::map<std::string, Question>;  // by the encoded request
  using Waiting = std::map<Asker, Questions::iterator>;

  static void Answer(FrameServer& server, const Asker& asker,
                     std::shared_ptr<const std::string> answer) {
    server.Send(asker.connection, std::move(answer), EncodeRequestNumber(asker.number));
  }

  // Returns what follows `waiting`.
  Waiting::iterator Forget(Waiting::iterator waiting) {
    const Questions::iterator question = waiting->second;
    question->second.askers.erase(waiting->first);
    if (question->second.askers.empty()) questions_.erase(question);
    return waiting_.erase(waiting);
  }

  // Returns nothing while the answer has room for a value whose key is not set.
  std::optional<std::string> AnswerTo(Question* question) const {
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
  Waiting waiting_;
  std::map<Asker, StoreRequest> wills_;
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
