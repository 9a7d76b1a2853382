// The messages between TcpStoreClient and TcpStoreServer, after the handshake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kMaxKeyBytes = 1024;
constexpr size_t kMaxValueBytes = size_t{16} << 20;

// The purpose of the handshake on a rendezvous connection.
inline constexpr char kStorePurpose[] = "rendezvous";

// A will is a Set that the server carries out when the connection ends; an empty one withdraws it.
enum class StoreRequest : uint32_t { kSet = 1, kGet = 2, kWill = 3 };

// A request is this header, the key, and the value (not of a Get).
struct StoreRequestHeader {
  StoreRequest request = StoreRequest::kGet;
  uint32_t key_bytes = 0;
  uint32_t value_bytes = 0;
};

constexpr size_t kStoreRequestBytes = 12;
// An answer is the length of the value (0 but for a Get) and the value.
constexpr size_t kStoreAnswerBytes = 4;

std::array<std::byte, kStoreRequestBytes> EncodeStoreRequest(const StoreRequestHeader& header);
// kInvalidArgument for unknown requests and for lengths above the limits.
Result<StoreRequestHeader> DecodeStoreRequest(ConstBytes bytes);

// Both limits, for the caller's side.
Status CheckStoreSizes(const std::string& key, size_t value_bytes);

}  // namespace sparkhvd
