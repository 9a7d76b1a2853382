// Authenticated encryption of one direction of a link with OpenSSL's libcrypto.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kCipherTagBytes = 16;

// libcrypto, loaded at its first use. The core is built without OpenSSL's headers, and only
// encryption needs the library.
class CryptoLibrary {
 public:
  // Loads the first of `names` that is available. Fails with kIo and a remedy.
  static Result<std::shared_ptr<CryptoLibrary>> Load(const std::vector<std::string>& names = {
                                                         "libcrypto.so.3", "libcrypto.so.1.1"});
  ~CryptoLibrary();
  CryptoLibrary(const CryptoLibrary&) = delete;
  CryptoLibrary& operator=(const CryptoLibrary&) = delete;

  struct Functions;
  const Functions& functions() const { return *functions_; }

 private:
  explicit CryptoLibrary(void* handle);
  void* handle_;
  std::unique_ptr<Functions> functions_;
};

// AES-256-GCM. A key serves one direction of one connection, and the nonce is the record's number,
// so an altered, omitted, repeated or reordered record fails authentication.
class LinkCipher {
 public:
  enum class Use { kSeal, kOpen };

  static Result<LinkCipher> Make(std::shared_ptr<CryptoLibrary> library, const Digest& key,
                                 Use use);
  LinkCipher(LinkCipher&&) noexcept;
  LinkCipher& operator=(LinkCipher&& other) noexcept;
  ~LinkCipher();

  // `sealed` holds the ciphertext of `plain` and kCipherTagBytes for the tag. `plain` and `sealed`
  // may begin at the same address.
  Status Seal(ConstBytes plain, Bytes sealed);
  // Decrypts; `plain` may overlap `sealed`. Fails with kAuthentication unless the peer sealed this
  // record.
  Status Open(ConstBytes sealed, Bytes plain);

 private:
  LinkCipher(std::shared_ptr<CryptoLibrary> library, void* context)
      : library_(std::move(library)), context_(context) {}
  std::array<unsigned char, 12> NextNonce();

  std::shared_ptr<CryptoLibrary> library_;
  void* context_;
  uint64_t records_ = 0;
};

}  // namespace sparkhvd
