// Registers RendezvousServer and RendezvousClient.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "rendezvous/tcp_store_client.h"

namespace sparkhvd::bindings {

// The Python object RendezvousClient. Engines that are built with it share its connection.
struct RendezvousClient {
  std::shared_ptr<TcpStoreClient> client;
};

void RegisterRendezvous(pybind11::module_& module);

}  // namespace sparkhvd::bindings
