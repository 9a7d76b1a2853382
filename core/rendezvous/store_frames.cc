#include "rendezvous/store_frames.h"

#include <array>

#include "base/wire.h"

namespace sparkhvd {

std::string EncodeStoreRequest(const StoreRequest& request) {
  std::array<std::byte, kStoreHeadBytes> head;
  StoreLittleEndian(static_cast<uint32_t>(request.kind), head.data());
  StoreLittleEndian(static_cast<uint32_t>(request.key.size()), head.data() + 4);
  std::string bytes(reinterpret_cast<const char*>(head.data()), head.size());
  return bytes.append(request.key).append(request.value);
}

Result<StoreRequest> DecodeStoreRequest(ConstBytes bytes) {
  const Status malformed(StatusCode::kInvalidArgument, "malformed rendezvous request");
  if (bytes.size() < kStoreHeadBytes) return malformed;
  StoreRequest request;
  request.kind = static_cast<StoreRequestKind>(LoadLittleEndian<uint32_t>(bytes.data()));
  const size_t key_bytes = LoadLittleEndian<uint32_t>(bytes.data() + 4);
  const size_t rest = bytes.size() - kStoreHeadBytes;
  if (key_bytes > kMaxKeyBytes || key_bytes > rest || rest - key_bytes > kMaxValueBytes) {
    return malformed;
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data() + kStoreHeadBytes);
  request.key.assign(text, key_bytes);
  request.value.assign(text + key_bytes, rest - key_bytes);
  const bool known = request.kind == StoreRequestKind::kSet ||
                     request.kind == StoreRequestKind::kWill ||
                     (request.kind == StoreRequestKind::kGet && request.value.empty());
  if (!known) return malformed;
  return request;
}

Status CheckStoreSizes(const std::string& key, size_t value_bytes) {
  if (key.size() > kMaxKeyBytes) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous key has at most " +
                                                    std::to_string(kMaxKeyBytes) + " bytes, not " +
                                                    std::to_string(key.size()));
  }
  if (value_bytes > kMaxValueBytes) {
    return Status(StatusCode::kInvalidArgument,
                  "the value of key '" + key + "' has " + std::to_string(value_bytes) +
                      " bytes; a rendezvous value has at most " + std::to_string(kMaxValueBytes) +
                      "; pass larger values through the Store");
  }
  return Status();
}

}  // namespace sparkhvd
