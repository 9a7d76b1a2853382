// The rendezvous of a job whose ranks are processes: a key-value store behind an authenticated TCP
// port.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/fork_guard.h"
#include "base/unique_fd.h"
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
  const HostPort& address() const { return address_; }

  Status Set(const std::string& key, const std::string& value, Deadline deadline) override;
  Result<std::string> Get(const std::string& key, Deadline deadline) override;

  // Ends all connections and the thread. Clients and local waiters wake with kPeerLost. A second
  // call is harmless, but two threads must not call it at once. In a forked child, it leaves the
  // parent's server alone.
  void Close();

 private:
  TcpStoreServer(HostPort address, UniqueFd wake, Reception reception);
  void Serve(Reception reception);
  void Ring();

  const HostPort address_;
  const ForkGuard guard_;
  UniqueFd wake_;          // eventfd that a local Set or Close writes to wake the thread
  std::mutex wake_mutex_;  // keeps wake_ open during a write; innermost in the lock order
  InProcessStore values_;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace sparkhvd
