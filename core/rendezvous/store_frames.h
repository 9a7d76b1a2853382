// The messages between TcpStoreClient and TcpStoreServer after the handshake.
//
// Each has a head of fixed length and a body. If the server encrypts, each of the two is sealed
// separately.
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

// A will is a Set that the server carries out when the connection ends. An empty will withdraws it.
enum class StoreRequest : uint32_t { kSet = 1, kGet = 2, kWill = 3 };

// A request is this header, the key, and the value of a Set.
struct StoreRequestHeader {
  StoreRequest request = StoreRequest::kGet;
  uint32_t key_bytes = 0;
  uint32_t value_bytes = 0;
};

constexpr size_t kStoreRequestBytes = 12;
// An answer is the length of the value and the value. Both are empty except for Get.
constexpr size_t kStoreAnswerBytes = 4;

std::array<std::byte, kStoreRequestBytes> EncodeStoreRequest(const StoreRequestHeader& header);
// Fails with kInvalidArgument for unknown requests and for lengths above the limits.
Result<StoreRequestHeader> DecodeStoreRequest(ConstBytes bytes);

// Seals the heads and bodies of one connection. Without keys, it leaves them unchanged.
class StoreCipher {
 public:
  StoreCipher() = default;
  // Makes the cipher of one side. Fails if OpenSSL is missing.
  static Result<StoreCipher> Make(const Digest& sending, const Digest& receiving);

  // Returns the number of bytes that sealing adds.
  size_t overhead() const { return sealing_ ? kCipherTagBytes : 0; }
  // Seals `plain` and appends it to `out`.
  Status Seal(ConstBytes plain, std::vector<std::byte>* out);
  // Opens a record in place; the plain content is at its beginning afterwards. Fails with
  // kAuthentication unless the peer sealed this record.
  Result<Bytes> Open(Bytes sealed);

 private:
  std::optional<LinkCipher> sealing_;
  std::optional<LinkCipher> opening_;
};

// Checks both limits on the caller's side.
Status CheckStoreSizes(const std::string& key, size_t value_bytes);

}  // namespace sparkhvd
