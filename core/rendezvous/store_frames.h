// The payloads of the frames between TcpStoreClient and TcpStoreServer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/span.h"
#include "base/status.h"
#include "rendezvous/frames.h"

namespace sparkhvd {

constexpr size_t kMaxKeyBytes = 1024;
constexpr size_t kMaxValueBytes = size_t{16} << 20;

// The purpose of the handshake on a rendezvous connection.
inline constexpr char kStorePurpose[] = "rendezvous";

// A will is a Set that the server carries out when the connection ends. An empty will withdraws it.
enum class StoreRequestKind : uint32_t { kSet = 1, kGet = 2, kWill = 3 };

// The answer to a request is the value, which is empty except for Get.
struct StoreRequest {
  StoreRequestKind kind = StoreRequestKind::kGet;
  std::string key;
  std::string value;
};

// A request is its kind, the length of the key, the key and the value.
constexpr size_t kStoreHeadBytes = 8;
constexpr FrameLimits kStoreLimits = {kStoreHeadBytes + kMaxKeyBytes + kMaxValueBytes};

std::string EncodeStoreRequest(const StoreRequest& request);
// Fails with kInvalidArgument for unknown requests and for lengths above the limits.
Result<StoreRequest> DecodeStoreRequest(ConstBytes bytes);

// Checks both limits on the caller's side.
Status CheckStoreSizes(const std::string& key, size_t value_bytes);

}  // namespace sparkhvd
