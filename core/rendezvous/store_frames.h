// The messages between TcpStoreClient and TcpStoreServer, after the handshake.
//
// Each has a head of fixed length and a body. Where the server encrypts, both are sealed one by
// one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/link_cipher.h"
#include "base/sha256.h"
#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kMaxKeyBytes = 1024;
constexpr size_t kMaxValueBytes = size_t{16} << 20;

// The purpose of the handshake on a rendezvous connection.
inline constexpr char kStorePurpose[] = "rendezvous";

// A will is a Set that the server carries out when the connection ends; an empty one withdraws it.
enum class StoreRequest : uint32_t { kSet = 1, kGet = 2, kWill = 3 };

// A request is this header, and the key and the value (not of a Get).
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

// What seals the heads and bodies of one connection; made without keys it leaves them as they are.
class StoreCipher {
 public:
  StoreCipher() = default;
  // For one of both sides. Fails where OpenSSL is missing.
  static Result<StoreCipher> Make(const Digest& sending, const Digest& receiving);

  // By how much what travels is longer than what was said.
  size_t overhead() const { return sealing_ ? kCipherTagBytes : 0; }
  // Appends `plain` as it travels.
  Status Seal(ConstBytes plain, std::vector<std::byte>* out);
  // In place: leaves the content at the beginning of what travelled, as far as it reaches.
  // kAuthentication when the other side did not say it at this place.
  Result<Bytes> Open(Bytes travelled);

 private:
  std::optional<LinkCipher> sealing_;
  std::optional<LinkCipher> opening_;
};

// Both limits, for the caller's side.
Status CheckStoreSizes(const std::string& key, size_t value_bytes);

}  // namespace sparkhvd
