// A rendezvous server in virtual time: ranks are threads that run the real code of a job's start,
// and every frame has the cost of a model.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rendezvous/frames.h"
#include "rendezvous/handshake.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/store_frames.h"
#include "simulation/virtual_network.h"

namespace sparkhvd {

// Sends the frames that TcpStoreClient and TcpStoreServer exchange, over connections that begin
// with a handshake. The server handles one frame at a time, in the order of their arrival, and all
// ranks are on other hosts. Its link limits what it sends. A rank never gives up a wait, so it does
// not ask for the failures of others meanwhile. The time to compute HMACs is not included.
//
// Only one rank runs at a time, and the server handles a frame only while all ranks wait for it. So
// no earlier frame can follow, and the results are the same in every run.
class VirtualStore {
 public:
  VirtualStore(int ranks, const NetworkCosts& costs)
      : costs_(costs), ranks_(static_cast<size_t>(ranks)) {}

  // Runs `body` for every rank with its client of the store, each on a thread.
  void OnEveryRank(const std::function<void(int rank, KeyValueStore&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      threads.emplace_back([this, &body, rank] {
        AwaitTurn(rank);
        {
          Client client(*this, rank);
          body(rank, client);
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        running_ = kNobody;
        changed_.notify_all();
      });
      turns_.push_back(rank);
    }
    Serve();
    for (std::thread& thread : threads) thread.join();
  }

  const VirtualRank& rank(int rank) const { return At(rank).own; }
  const VirtualRank& server() const { return server_; }
  double Latest() const {
    double latest = 0;
    for (const Rank& rank : ranks_) latest = std::max(latest, rank.own.now);
    return latest;
  }

 private:
  static constexpr int kNobody = -1;
  // Besides a request or an answer.
  static constexpr size_t kFrameBytes = kFrameHeadBytes + kRequestNumberBytes + sizeof(Digest);

  struct Rank {
    VirtualRank own;
    double answered = 0;  // when the last byte of the answer arrived
    Status status;
    std::shared_ptr<const std::string> answer;
    std::condition_variable turn;
  };
  // A frame on its way to the server.
  struct Frame {
    int rank;
    StoreRequest request;
    size_t answer_bytes;  // unless the request is a Get or GetAll
  };

  struct Question {
    StoreRequest request;
    std::vector<int> ranks;
  };

  class Client final : public KeyValueStore {
   public:
    Client(VirtualStore& store, int rank) : store_(store), rank_(rank) { store_.Connect(rank_); }

    Status Set(const std::string& key, const std::string& value, Deadline) override {
      return Ask({StoreRequestKind::kSet, key, value}).status();
    }
    Result<std::string> Get(const std::string& key, Deadline) override {
      const auto answer = Ask({StoreRequestKind::kGet, key, ""});
      if (!answer.ok()) return answer.status();
      return *answer.value();
    }
    Result<std::vector<std::string>> GetAll(const std::string& prefix, NumberRange numbers,
                                            Deadline) override {
      std::vector<std::string> values;
      for (NumberRange rest = numbers; rest.first < rest.end;) {
        const auto answer = Ask({StoreRequestKind::kGetAll, prefix, EncodeNumberRange(rest)});
        if (!answer.ok()) return answer.status();
        auto decoded = DecodeAnswer(AsBytes(*answer.value()));
        if (!decoded.ok()) return decoded.status();
        rest.first += static_cast<uint32_t>(decoded.value().size());
        std::move(decoded.value().begin(), decoded.value().end(), std::back_inserter(values));
      }
      return values;
    }
    Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                            Deadline) override {
      SHVD_TRY(Ask({StoreRequestKind::kWill, key, value}).status());
      return std::unique_ptr<Will>(std::make_unique<WithdrawnWill>(*this));
    }

   private:
    class WithdrawnWill final : public Will {
     public:
      explicit WithdrawnWill(Client& client) : client_(client) {}
      void Withdraw() override {
        (void)client_.Ask({StoreRequestKind::kWithdraw, "", EncodeRequestNumber(0)});
      }

     private:
      Client& client_;
    };

    Result<std::shared_ptr<const std::string>> Ask(const StoreRequest& request) {
      return store_.Exchange({rank_, request, kFrameBytes},
                             EncodeStoreRequest(request).size() + kFrameBytes);
    }

    VirtualStore& store_;
    const int rank_;
  };

  Rank& At(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  const Rank& At(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

  // TCP's own handshake takes a round trip.
  void Connect(int rank) {
    const StoreRequest none{StoreRequestKind::kWill, "", ""};
    At(rank).own.now += 2 * costs_.latency;
    (void)Exchange({rank, none, kWelcomeBytes}, kHelloBytes);
    (void)Exchange({rank, none, kProofBytes}, kProofBytes);
  }

  // Sends a frame of the running rank, and waits for the answer.
  Result<std::shared_ptr<const std::string>> Exchange(Frame frame, size_t bytes) {
    Rank& self = At(frame.rank);
    const int rank = frame.rank;
    Spend(self.own, bytes);
    const double line = static_cast<double>(bytes) * costs_.per_byte;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      arrivals_.emplace(std::pair(self.own.now + line + costs_.latency, rank), std::move(frame));
      running_ = kNobody;
      changed_.notify_all();
    }
    AwaitTurn(rank);
    self.own.now = self.answered + costs_.per_message;
    SHVD_TRY(std::exchange(self.status, Status()));
    return std::move(self.answer);
  }

  void Spend(VirtualRank& sender, size_t bytes) const {
    sender.now += costs_.per_message;
    ++sender.messages;
    sender.bytes += bytes;
  }

  void AwaitTurn(int rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    At(rank).turn.wait(lock, [&] { return running_ == rank; });
  }

  // Lets the ranks that have an answer run one after the other, and then handles the next frame.
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return running_ == kNobody; });
      if (!turns_.empty()) {
        running_ = turns_.front();
        turns_.pop_front();
        At(running_).turn.notify_one();
      } else if (!arrivals_.empty()) {
        const double arrival = arrivals_.begin()->first.first;
        const Frame frame = arrivals_.extract(arrivals_.begin()).mapped();
        server_.now = std::max(server_.now, arrival) + costs_.per_message;
        Handle(frame);
      } else if (!questions_.empty()) {
        const Question question = questions_.extract(questions_.begin()).mapped();
        const std::string message = "no rank is left to set '" + question.request.key + "'";
        for (const int rank : question.ranks) {
          At(rank).status = Status(StatusCode::kPeerLost, message);
          Answer(rank, kFrameBytes, nullptr);
        }
      } else {
        return;
      }
    }
  }

  void Handle(const Frame& frame) {
    const auto& [kind, key, value] = frame.request;
    if (kind == StoreRequestKind::kGet || kind == StoreRequestKind::kGetAll) {
      Question& question = questions_[EncodeStoreRequest(frame.request)];
      question.request = frame.request;
      question.ranks.push_back(frame.rank);
    } else {
      if (kind == StoreRequestKind::kSet) (void)values_.Set(key, value, Deadline::AfterSeconds(0));
      Answer(frame.rank, frame.answer_bytes, std::make_shared<std::string>());
    }
    for (auto entry = questions_.begin(); entry != questions_.end();) {
      const auto answer = Find(entry->second.request);
      if (answer) {
        for (const int rank : entry->second.ranks) {
          Answer(rank, kFrameBytes + answer->size(), answer);
        }
      }
      entry = answer ? questions_.erase(entry) : std::next(entry);
    }
  }

  // Returns null while the answer has room for a value whose key is not set.
  std::shared_ptr<const std::string> Find(const StoreRequest& request) const {
    if (request.kind == StoreRequestKind::kGet) {
      const auto value = values_.Find(request.key);
      return value ? std::make_shared<std::string>(*value) : nullptr;
    }
    const NumberRange numbers = DecodeNumberRange(AsBytes(request.value)).value();
    const auto value_of = [&](uint32_t number) {
      return values_.Find(request.key + std::to_string(number));
    };
    if (!value_of(numbers.end - 1)) return nullptr;  // usually set last, so this saves time
    auto answer = std::make_shared<std::string>();
    for (uint32_t number = numbers.first; number < numbers.end; ++number) {
      const auto value = value_of(number);
      if (!value) return nullptr;
      if (!AppendToAnswer(answer.get(), *value)) break;
    }
    return answer;
  }

  void Answer(int rank, size_t bytes, std::shared_ptr<const std::string> answer) {
    Spend(server_, bytes);
    sending_until_ =
        std::max(server_.now, sending_until_) + static_cast<double>(bytes) * costs_.per_byte;
    Rank& receiver = At(rank);
    receiver.answered = sending_until_ + costs_.latency;
    receiver.answer = std::move(answer);
    turns_.push_back(rank);
  }

  const NetworkCosts costs_;
  std::deque<Rank> ranks_;
  VirtualRank server_;
  double sending_until_ = 0;  // the server
  InProcessStore values_;
  std::map<std::string, Question> questions_;  // that wait for keys, by their frame

  std::mutex mutex_;  // guards the fields below, and passes the turn to use all others
  std::condition_variable changed_;
  int running_ = kNobody;
  std::deque<int> turns_;                             // ranks that may run
  std::map<std::pair<double, int>, Frame> arrivals_;  // by time and rank
};

}  // namespace sparkhvd
