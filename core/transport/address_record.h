// The addresses that a rank publishes through the rendezvous.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

// Values by name of settings that have to be equal on all ranks.
using CommonSettings = std::map<std::string, std::string>;

struct AddressRecord {
  std::vector<HostPort> tcp;  // preferred address first
  std::string unix_name;      // empty if the rank has no host key
  std::string host_key;
  bool shared_memory = false;
  bool encrypt = false;
  uint64_t arena_region_bytes = 0;
  uint64_t settings_digest = 0;  // ranks with equal settings have equal digests
};

std::string EncodeAddressRecord(const AddressRecord& record);
Result<AddressRecord> DecodeAddressRecord(const std::string& bytes);

std::string EncodeSettings(const CommonSettings& settings);
Result<CommonSettings> DecodeSettings(const std::string& bytes);
// Returns 0 if there are no settings.
uint64_t DigestOf(const CommonSettings& settings);

}  // namespace sparkhvd
