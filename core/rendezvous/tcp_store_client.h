// The client of a TcpStoreServer.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "rendezvous/frames.h"
#include "rendezvous/key_value_store.h"
#include "rendezvous/socket.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {

// Thread-safe: all calls share one connection, and a thread that waits for a key does not block the
// others. After a timeout, the server keeps the request of a Get, and the next Get of the key takes
// its answer, so polling is cheap. The client has no thread: one of the calls in progress receives
// for all of them. If the connection fails, so do these calls; the next one dials again. The client
// encrypts if the server does. In a forked child, only Close works. It closes the child's copy of
// the connection.
class TcpStoreClient final : public KeyValueStore {
 public:
  // Keeps the address of the first server that answers and knows the token. For `check` and
  // `require_encryption`, see DialOptions.
  static Result<std::unique_ptr<TcpStoreClient>> Connect(const std::vector<HostPort>& addresses,
                                                         const std::string& token,
                                                         Deadline deadline,
                                                         const std::function<Status()>& check = {},
                                                         bool require_encryption = false);
  ~TcpStoreClient() override;

  Status Set(const std::string& key, const std::string& value, Deadline deadline) override;
  Result<std::string> Get(const std::string& key, Deadline deadline) override;
  Result<std::vector<std::string>> GetAll(const std::string& prefix, NumberRange numbers,
                                          Deadline deadline) override;
  Result<std::vector<uint32_t>> Missing(const std::string& prefix, NumberRange numbers,
                                        Deadline deadline) override;
  void StopAsking(const std::string& key) override;
  Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                          Deadline deadline) override;

  // Wakes the calls in progress with kShutDown. Later calls fail with it, too.
  void Close();

 private:
  class ConnectedWill;

  struct PendingRequest {
    std::string key;
    std::string encoded;  // only of a Get or a GetAll
    bool awaited = true;  // by a call in progress
    std::optional<std::string> answer = std::nullopt;
  };
  using PendingRequests = std::map<uint32_t, PendingRequest>;  // by number, oldest first

  // The connection and the requests whose answers have not been taken. The calls that use it own
  // it, so it outlives a failure.
  struct Line {
    explicit Line(FrameConnection framed) : connection(std::move(framed)) {}

    FrameConnection connection;
    PendingRequests pending;
    uint32_t last = 0;      // number of a request
    bool receives = false;  // whether a call in progress waits for input
    Status failure;
  };

  TcpStoreClient(HostPort server, std::string token, bool require_encryption,
                 FrameConnection first);

  // Returns the line, and dials if there is none.
  Result<std::shared_ptr<Line>> Connected(Deadline deadline);
  // Waits for the answer. After a timeout, the request of a Get or a GetAll stays with the server.
  Result<std::string> Ask(const StoreRequest& request, Deadline deadline);
  Result<std::string> AskOn(Line& line, const StoreRequest& request, Deadline deadline);
  Status Explain(const Status& failure, const std::string& key, StoreRequestKind kind);

  // The following functions require the mutex.
  uint32_t Send(Line& line, const std::string& encoded);
  PendingRequests::iterator Post(Line& line, const StoreRequest& request);
  // Releases the lock while it waits.
  Status AwaitAnswer(std::unique_lock<std::mutex>& lock, Line& line, const PendingRequest& request,
                     Deadline deadline);
  void Advance(Line& line);
  static Status Deliver(Line& line, std::string frame);
  void Withdraw(Line& line, uint32_t number);
  PendingRequests::iterator Forget(Line& line, PendingRequests::iterator request);
  void Fail(Line& line, const Status& why);

  const HostPort server_;
  const std::string token_;
  const bool require_encryption_;
  const ForkGuard guard_;
  std::mutex mutex_;  // guards the fields below and the line's; innermost in the lock order
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  bool closed_ = false;
  std::shared_ptr<Line> line_;  // null if it has failed
};

}  // namespace sparkhvd
