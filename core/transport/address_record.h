// The addresses that a rank publishes through the rendezvous.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

struct AddressRecord {
  std::vector<HostPort> tcp;  // preferred address first
  std::string unix_name;      // empty if the rank has no host key
  std::string host_key;
  bool shared_memory = false;
  bool encrypt = false;
  uint64_t arena_region_bytes = 0;
  std::map<std::string, std::string> common_settings;  // see MeshOptions
};

std::string EncodeAddressRecord(const AddressRecord& record);
Result<AddressRecord> DecodeAddressRecord(const std::string& bytes);

}  // namespace sparkhvd
