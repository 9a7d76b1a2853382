#include "bindings/message_binding.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "base/io_status.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/interruptible.h"
#include "rendezvous/dial.h"
#include "rendezvous/message_server.h"

namespace py = pybind11;

namespace sparkhvd::bindings {
namespace {

// A FrameConnection that any thread may end while others use it.
class Connection {
 public:
  explicit Connection(FrameConnection connection) : connection_(std::move(connection)) {}
  ~Connection() { Close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return connection_.fd(); }

  void Send(std::string_view payload, double timeout_s) {
    const Use use(*this);
    Check(connection_.Queue(AsBytes(payload)));
    Check(WaitInSlices(
        timeout_s, [this](Deadline deadline) { return connection_.AwaitFlushed(deadline); },
        [] { return false; }));
  }

  py::bytes Receive(double timeout_s) {
    const Use use(*this);
    std::string payload;
    Check(WaitInSlices(
        timeout_s,
        [this, &payload](Deadline deadline) {
          auto frame = connection_.Receive(deadline);
          if (frame.ok()) payload = std::move(frame).value();
          return frame.status();
        },
        [this] { return connection_.IsFrameLate(); }));
    return py::bytes(payload);
  }

  void SetAckTimeout(double seconds) {
    const Use use(*this);
    const int millis = static_cast<int>(seconds * 1000);
    // An error is only possible on a Unix socket, whose peer is on this host.
    (void)::setsockopt(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &millis, sizeof(millis));
  }

  // Ends every wait.
  void Wake() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (connection_.fd() >= 0) (void)::shutdown(connection_.fd(), SHUT_RDWR);
  }

  // In a forked child, only the child's descriptor is closed.
  void Close() {
    if (guard_.InChild()) return connection_.Close();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (connection_.fd() >= 0) (void)::shutdown(connection_.fd(), SHUT_RDWR);
    closed_ = true;
    if (users_ == 0) connection_.Close();
  }

 private:
  // Keeps the descriptor open during a call.
  class Use {
   public:
    explicit Use(Connection& connection) : connection_(connection) {
      const std::lock_guard<std::mutex> lock(connection_.mutex_);
      if (connection_.closed_) {
        throw CoreFailure(Status(StatusCode::kPeerLost, "this connection is closed"));
      }
      ++connection_.users_;
    }
    ~Use() {
      const std::lock_guard<std::mutex> lock(connection_.mutex_);
      if (--connection_.users_ == 0 && connection_.closed_) connection_.connection_.Close();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Connection& connection_;
  };

  FrameConnection connection_;
  const ForkGuard guard_;
  std::mutex mutex_;  // guards the fields below; innermost in the lock order
  int users_ = 0;     // calls in progress
  bool closed_ = false;
};

// Unlike the failure of a connection, a missing OpenSSL is a mistake in this host's setup.
void CheckEncryption() {
  const Status status = FrameProtection::Make(Digest(), true, LinkCipher::Use::kSeal).status();
  if (!status.ok()) Check(Status(StatusCode::kInvalidArgument, status.message()));
}

std::unique_ptr<Connection> Framed(UniqueFd fd, const SessionKeys& keys, Side side) {
  if (keys.encrypt) CheckEncryption();
  return std::make_unique<Connection>(
      Take(FrameConnection::Make(std::move(fd), keys, side, kMessageLimits)));
}

std::unique_ptr<Connection> Connect(DialOptions options, double timeout_s) {
  options.purpose = kMessagePurpose;
  options.check = CheckSignals;
  SessionKeys keys;
  auto dialed = [&] {
    const GilRelease release;
    return Dial(options, Deadline::AfterSeconds(timeout_s), &keys);
  }();
  ThrowIfInterrupted();
  UniqueFd fd = Take(std::move(dialed));
  LimitSilence(fd.get(), kSilentRendezvous);
  return Framed(std::move(fd), keys, Side::kDialer);
}

std::unique_ptr<Connection> ConnectTcp(
    const std::vector<std::pair<std::string, uint16_t>>& addresses, const std::string& token,
    double timeout_s, bool encrypt) {
  DialOptions options;
  for (const auto& [host, port] : addresses) options.addresses.push_back({host, port});
  options.token = token;
  options.require_encryption = encrypt;
  return Connect(std::move(options), timeout_s);
}

std::unique_ptr<Connection> ConnectUnixSocket(const std::string& name, const std::string& token,
                                              double timeout_s) {
  DialOptions options;
  options.unix_name = name;
  options.token = token;
  return Connect(std::move(options), timeout_s);
}

std::unique_ptr<Connection> Accept(int socket, const std::string& token, double timeout_s) {
  UniqueFd fd(::fcntl(socket, F_DUPFD_CLOEXEC, 0));
  if (!fd.valid() || ::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw CoreFailure(IoStatus("accept a connection", errno));
  }
  auto keys = [&] {
    const GilRelease release;
    return AcceptHandshake(fd.get(), token, kMessagePurpose, Deadline::AfterSeconds(timeout_s));
  }();
  return Framed(std::move(fd), Take(std::move(keys)), Side::kAcceptor);
}

// The same answer often goes to many peers in a row, so they share its bytes.
struct Server {
  std::unique_ptr<MessageServer> core;
  py::object last = py::none();
  std::shared_ptr<const std::string> shared = nullptr;  // the bytes of `last`

  void Send(uint64_t connection, const py::bytes& message) {
    if (!last.is(message)) {
      shared = std::make_shared<const std::string>(message);
      last = message;
    }
    core->Send(connection, shared);
  }
};

std::unique_ptr<Server> Start(const std::string& token, const std::string& host, uint16_t port,
                              bool encrypt, const std::string& name,
                              std::chrono::milliseconds host_timeout) {
  if (encrypt) CheckEncryption();
  auto started = [&] {
    const GilRelease release;
    return MessageServer::Start({host, port}, token, encrypt, name, host_timeout);
  }();
  return std::make_unique<Server>(Server{Take(std::move(started))});
}

// connection, message or None, and the code, the text and the errno of the connection's end
using Event = std::tuple<uint64_t, py::object, std::string, std::string, int>;

std::optional<Event> Next(Server& server, double timeout_s) {
  auto event = [&] {
    const GilRelease release;
    return server.core->Next(Deadline::AfterSeconds(timeout_s));
  }();
  if (event.status().code() == StatusCode::kTimeout) return std::nullopt;
  const MessageEvent taken = Take(std::move(event));
  py::object message = py::none();
  if (taken.message) message = py::bytes(*taken.message);
  return Event(taken.connection, std::move(message), StatusCodeName(taken.end.code()),
               taken.end.message(), taken.end.error_number());
}

}  // namespace

void RegisterMessages(py::module_& module) {
  using py::arg;
  module.attr("MAX_MESSAGE_BYTES") = kMessageLimits.max_bytes;
  module.attr("SILENT_RENDEZVOUS_SECONDS") = static_cast<double>(kSilentRendezvous.count());
  module.def("check_encryption", &CheckEncryption);
  py::class_<Connection>(module, "FrameConnection")
      .def_static("connect", &ConnectTcp, arg("addresses"), arg("token"), arg("timeout_s"),
                  arg("encrypt") = false)
      .def_static("connect_unix", &ConnectUnixSocket, arg("name"), arg("token"), arg("timeout_s"))
      .def_static("accept", &Accept, arg("socket"), arg("token"), arg("timeout_s"))
      .def("fileno", &Connection::fd)
      .def("send", &Connection::Send, arg("payload"), arg("timeout_s"))
      .def("receive", &Connection::Receive, arg("timeout_s"))
      .def("set_ack_timeout", &Connection::SetAckTimeout, arg("seconds"))
      .def("wake", &Connection::Wake)
      .def("close", &Connection::Close);
  py::class_<Server>(module, "MessageServer")
      .def(py::init(&Start), arg("token"), arg("host"), arg("port"), arg("encrypt"), arg("name"),
           arg("host_timeout"))
      .def_property_readonly("port",
                             [](const Server& server) { return server.core->address().port; })
      .def("next", &Next, arg("timeout_s"))
      .def("send", &Server::Send, arg("connection"), arg("message"))
      .def(
          "resume",
          [](Server& server, uint64_t connection, double idle_seconds) {
            server.core->Resume(connection, idle_seconds);
          },
          arg("connection"), arg("idle_seconds"))
      .def(
          "drop", [](Server& server, uint64_t connection) { server.core->Drop(connection); },
          arg("connection"))
      .def(
          "close", [](Server& server, double seconds) { server.core->Close(seconds); },
          arg("seconds"), py::call_guard<GilRelease>());
}

}  // namespace sparkhvd::bindings
