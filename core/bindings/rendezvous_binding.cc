#include "bindings/rendezvous_binding.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/interruptible.h"
#include "rendezvous/local_addresses.h"
#include "rendezvous/tcp_store_server.h"

namespace py = pybind11;

namespace sparkhvd::bindings {
namespace {

using Address = std::pair<std::string, uint16_t>;

HostPort ToHostPort(const Address& address) {
  HostPort target;
  target.host = address.first;
  target.port = address.second;
  return target;
}

// The timeout of setting a value in this process's own server, which needs no network.
constexpr double kLocalSetSeconds = 10.0;

std::unique_ptr<TcpStoreServer> StartServer(const std::string& token, const std::string& host,
                                            uint16_t port, bool encrypt) {
  const GilRelease release;
  return Take(TcpStoreServer::Start(ToHostPort({host, port}), token, {}, encrypt));
}

py::bytes Get(KeyValueStore& store, const std::string& key, double timeout_s) {
  std::string value;
  Check(WaitInSlices(
      timeout_s,
      [&](Deadline deadline) {
        Result<std::string> result = store.Get(key, deadline);
        if (!result.ok()) return result.status();
        value = std::move(result).value();
        return Status();
      },
      [] { return false; }));
  return py::bytes(value);
}

std::vector<py::bytes> GetAll(KeyValueStore& store, const std::string& prefix, uint32_t first,
                              uint32_t end, double timeout_s) {
  std::vector<std::string> values;
  Check(WaitInSlices(
      timeout_s,
      [&](Deadline deadline) {
        auto result = store.GetAll(prefix, {first, end}, deadline);
        if (!result.ok()) return result.status();
        values = std::move(result).value();
        return Status();
      },
      [] { return false; }));
  return {values.begin(), values.end()};
}

std::vector<uint32_t> Missing(KeyValueStore& store, const std::string& prefix, uint32_t first,
                              uint32_t end, double timeout_s) {
  auto missing = [&] {
    const GilRelease release;
    return store.Missing(prefix, {first, end}, Deadline::AfterSeconds(timeout_s));
  }();
  return Take(std::move(missing));
}

void Set(KeyValueStore& store, const std::string& key, const std::string& value, double timeout_s) {
  const GilRelease release;
  Check(store.Set(key, value, Deadline::AfterSeconds(timeout_s)));
}

RendezvousClient Connect(const std::vector<Address>& addresses, const std::string& token,
                         double timeout_s, bool encrypt) {
  std::vector<HostPort> targets;
  for (const Address& address : addresses) targets.push_back(ToHostPort(address));
  auto client = [&] {
    const GilRelease release;
    return TcpStoreClient::Connect(targets, token, Deadline::AfterSeconds(timeout_s), CheckSignals,
                                   encrypt);
  }();
  ThrowIfInterrupted();
  return RendezvousClient{std::shared_ptr<TcpStoreClient>(Take(std::move(client)))};
}

}  // namespace

void RegisterRendezvous(py::module_& module) {
  using py::arg;
  module.def("local_addresses", [] {
    std::vector<std::tuple<std::string, std::string, bool>> found;
    for (const LocalInterfaceAddress& address : Take(LocalAddresses())) {
      found.emplace_back(address.interface, address.host, address.loopback);
    }
    return found;
  });
  py::class_<TcpStoreServer>(module, "RendezvousServer")
      .def(py::init(&StartServer), arg("token"), arg("host") = "127.0.0.1", arg("port") = 0,
           arg("encrypt") = false)
      .def_property_readonly("port",
                             [](const TcpStoreServer& server) { return server.address().port; })
      .def_property_readonly("requests", &TcpStoreServer::requests)
      .def(
          "set",
          [](TcpStoreServer& server, const std::string& key, const py::bytes& value) {
            Set(server, key, value, kLocalSetSeconds);
          },
          arg("key"), arg("value"))
      .def(
          "get",
          [](TcpStoreServer& server, const std::string& key, double timeout_s) {
            return Get(server, key, timeout_s);
          },
          arg("key"), arg("timeout_s"))
      .def("erase", &TcpStoreServer::Erase, arg("prefix"), py::call_guard<GilRelease>())
      .def("close", &TcpStoreServer::Close, py::call_guard<GilRelease>());
  py::class_<RendezvousClient>(module, "RendezvousClient")
      .def(py::init(&Connect), arg("addresses"), arg("token"), arg("timeout_s"),
           arg("encrypt") = false)
      .def(
          "set",
          [](RendezvousClient& self, const std::string& key, const py::bytes& value,
             double timeout_s) { Set(*self.client, key, value, timeout_s); },
          arg("key"), arg("value"), arg("timeout_s"))
      .def(
          "get",
          [](RendezvousClient& self, const std::string& key, double timeout_s) {
            return Get(*self.client, key, timeout_s);
          },
          arg("key"), arg("timeout_s"))
      .def(
          "get_all",
          [](RendezvousClient& self, const std::string& prefix, uint32_t first, uint32_t end,
             double timeout_s) { return GetAll(*self.client, prefix, first, end, timeout_s); },
          arg("prefix"), arg("first"), arg("end"), arg("timeout_s"))
      .def(
          "missing",
          [](RendezvousClient& self, const std::string& prefix, uint32_t first, uint32_t end,
             double timeout_s) { return Missing(*self.client, prefix, first, end, timeout_s); },
          arg("prefix"), arg("first"), arg("end"), arg("timeout_s"))
      .def(
          "close", [](RendezvousClient& self) { self.client->Close(); },
          py::call_guard<GilRelease>());
}

}  // namespace sparkhvd::bindings
