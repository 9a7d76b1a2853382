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
inline constexpr char kAlteredData[] = "data from the link was altered in transit";

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

  // Encrypts a record whose content has two parts. `sealed` receives the ciphertext of both parts
  // and then the tag, of kCipherTagBytes, and overlaps neither part.
  Status Seal(ConstBytes head, ConstBytes rest, Bytes sealed);
  // Decrypts into two parts. `head` may begin where `sealed` begins if `rest` is empty. Fails with
  // kAuthentication unless the peer sealed this record; the parts then hold nothing of use.
  Status Open(ConstBytes sealed, Bytes head, Bytes rest = {});

 private:
  LinkCipher(std::shared_ptr<CryptoLibrary> library, void* context)
      : library_(std::move(library)), context_(context) {}
  std::array<unsigned char, 12> NextNonce();

  std::shared_ptr<CryptoLibrary> library_;
  void* context_;
  uint64_t records_ = 0;
};

}  // namespace sparkhvd
