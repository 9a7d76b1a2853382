// The rendezvous of a job whose ranks are processes: a key-value store behind an authenticated TCP
// port.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "rendezvous/frame_server.h"
#include "rendezvous/in_process_store.h"
#include "rendezvous/key_value_store.h"
#include "rendezvous/reception.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

// Serves from Start until Close on its own thread. The server's own Set and Get need no connection.
class TcpStoreServer final : public KeyValueStore {
 public:
  // Port 0 in `address` takes any free port. With `encrypt`, all messages are encrypted. Fails if
  // OpenSSL is missing.
  static Result<std::unique_ptr<TcpStoreServer>> Start(const HostPort& address,
                                                       const std::string& token,
                                                       ReceptionLimits limits = {},
                                                       bool encrypt = false);
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;
  ~TcpStoreServer() override;

  // Returns the bound address with the actual port.
  const HostPort& address() const { return server_->address(); }

  Status Set(const std::string& key, const std::string& value, Deadline deadline) override;
  Result<std::string> Get(const std::string& key, Deadline deadline) override;

  // Deletes all keys that begin with `prefix`, and returns their number. The keys can be set again.
  // Only the server's owner knows which keys no client will ask for any more.
  size_t Erase(const std::string& prefix) { return values_.Erase(prefix); }

  // Returns how many requests clients have sent.
  uint64_t requests() const;

  // Ends all connections and the thread. Clients and local waiters wake with kPeerLost. A second
  // call is harmless, but two threads must not call it at once. In a forked child, it leaves the
  // parent's server alone.
  void Close();

 private:
  class Handler;
  TcpStoreServer();

  InProcessStore values_;
  std::unique_ptr<Handler> handler_;  // outlives server_
  std::unique_ptr<FrameServer> server_;
};

}  // namespace sparkhvd
