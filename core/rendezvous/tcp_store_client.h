// The client of a TcpStoreServer.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/fork_guard.h"
#include "rendezvous/frames.h"
#include "rendezvous/key_value_store.h"
#include "rendezvous/socket.h"
#include "rendezvous/store_frames.h"

namespace sparkhvd {

// Thread-safe: every call in progress has its own connection, so a thread that waits for a key does
// not block the others. After a timeout, the server keeps the request of a Get, and the next Get of
// the key reuses the connection, so polling is cheap. The client has no thread. It encrypts if the
// server does. In a forked child, only Close works. It closes the child's copies of the
// connections.
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
  // Reserves a connection for the will until it is withdrawn.
  Result<std::unique_ptr<Will>> LeaveWill(const std::string& key, const std::string& value,
                                          Deadline deadline) override;

  // Wakes the calls in progress with kShutDown. Later calls fail with it, too.
  void Close();

 private:
  class ConnectedWill;

  // A request that timed out here, and the connection on which its answer may still arrive.
  struct PendingRequest {
    std::string key;
    std::string request;
    FrameConnection connection;
  };

  TcpStoreClient(HostPort server, std::string token, bool require_encryption,
                 FrameConnection first);

  static Result<std::string> Ask(FrameConnection& connection, const StoreRequest& request,
                                 Deadline deadline);
  // Sends a request that the server answers at once.
  Result<std::string> AskNow(const StoreRequest& request, Deadline deadline);
  // Sends a Get or a GetAll unless the server already has the request, and waits for the answer.
  Result<std::string> Await(const StoreRequest& request, Deadline deadline);
  Result<FrameConnection> Take(Deadline deadline);
  std::optional<FrameConnection> TakePending(const std::string& request);
  void ReleaseConnection(FrameConnection connection, bool reusable);
  void KeepPending(PendingRequest pending);
  Status Explain(const Status& failure, const std::string& key, StoreRequestKind kind);

  const HostPort server_;
  const std::string token_;
  const bool require_encryption_;
  const ForkGuard guard_;
  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  bool closed_ = false;
  std::vector<FrameConnection> idle_;
  std::list<PendingRequest> pending_;  // oldest first
  std::unordered_set<int> busy_;
};

}  // namespace sparkhvd
