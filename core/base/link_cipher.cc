#include "base/link_cipher.h"

#include <dlfcn.h>

#include <utility>

#include "base/wire.h"

namespace sparkhvd {

// The declarations of openssl/evp.h, which are the same in versions 1.1 and 3.
struct CryptoLibrary::Functions {
  void* (*context_new)();
  void (*context_free)(void*);
  const void* (*aes_256_gcm)();
  int (*control)(void*, int, int, void*);
  int (*encrypt_init)(void*, const void*, void*, const unsigned char*, const unsigned char*);
  int (*encrypt_update)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*encrypt_final)(void*, unsigned char*, int*);
  int (*decrypt_init)(void*, const void*, void*, const unsigned char*, const unsigned char*);
  int (*decrypt_update)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*decrypt_final)(void*, unsigned char*, int*);
};

namespace {

constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

template <typename Function>
bool Find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(handle, name));
  return *function != nullptr;
}

bool FindAll(void* handle, CryptoLibrary::Functions* found) {
  return Find(handle, "EVP_CIPHER_CTX_new", &found->context_new) &&
         Find(handle, "EVP_CIPHER_CTX_free", &found->context_free) &&
         Find(handle, "EVP_aes_256_gcm", &found->aes_256_gcm) &&
         Find(handle, "EVP_CIPHER_CTX_ctrl", &found->control) &&
         Find(handle, "EVP_EncryptInit_ex", &found->encrypt_init) &&
         Find(handle, "EVP_EncryptUpdate", &found->encrypt_update) &&
         Find(handle, "EVP_EncryptFinal_ex", &found->encrypt_final) &&
         Find(handle, "EVP_DecryptInit_ex", &found->decrypt_init) &&
         Find(handle, "EVP_DecryptUpdate", &found->decrypt_update) &&
         Find(handle, "EVP_DecryptFinal_ex", &found->decrypt_final);
}

const unsigned char* Raw(const std::byte* data) {
  return reinterpret_cast<const unsigned char*>(data);
}
unsigned char* Raw(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }

using UpdateFunction = int (*)(void*, unsigned char*, int*, const unsigned char*, int);

// Skips empty data, because OpenSSL 1.1 ends the record at a null pointer.
bool Update(UpdateFunction update, void* context, ConstBytes from, std::byte* to) {
  int length = 0;
  return from.empty() ||
         update(context, Raw(to), &length, Raw(from.data()), static_cast<int>(from.size())) == 1;
}

Status LibraryFailure(const char* what) {
  return Status(StatusCode::kInternal, std::string("libcrypto failed to ") + what);
}

}  // namespace

CryptoLibrary::CryptoLibrary(void* handle)
    : handle_(handle), functions_(std::make_unique<Functions>()) {}

CryptoLibrary::~CryptoLibrary() { ::dlclose(handle_); }

Result<std::shared_ptr<CryptoLibrary>> CryptoLibrary::Load(const std::vector<std::string>& names) {
  std::string tried;
  for (const std::string& name : names) {
    tried += (tried.empty() ? "" : " or ") + name;
    void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    auto library = std::shared_ptr<CryptoLibrary>(new CryptoLibrary(handle));
    if (FindAll(handle, library->functions_.get())) return library;
  }
  return Status(StatusCode::kIo, "encryption needs OpenSSL's " + tried +
                                     ", which this host does not have; install OpenSSL on every "
                                     "host or turn encryption off");
}

Result<LinkCipher> LinkCipher::Make(std::shared_ptr<CryptoLibrary> library, const Digest& key,
                                    Use use) {
  const CryptoLibrary::Functions& crypto = library->functions();
  void* context = crypto.context_new();
  if (context == nullptr) return LibraryFailure("create a cipher");
  LinkCipher cipher(std::move(library), context);
  const auto init = use == Use::kSeal ? crypto.encrypt_init : crypto.decrypt_init;
  if (init(context, crypto.aes_256_gcm(), nullptr, Raw(key.data()), nullptr) != 1) {
    return LibraryFailure("set a key");
  }
  return cipher;
}

LinkCipher::LinkCipher(LinkCipher&& other) noexcept
    : library_(std::move(other.library_)),
      context_(std::exchange(other.context_, nullptr)),
      records_(other.records_) {}

LinkCipher& LinkCipher::operator=(LinkCipher&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(context_, other.context_);
  std::swap(records_, other.records_);
  return *this;
}

LinkCipher::~LinkCipher() {
  if (context_ != nullptr) library_->functions().context_free(context_);
}

std::array<unsigned char, 12> LinkCipher::NextNonce() {
  std::array<unsigned char, 12> nonce{};
  StoreLittleEndian(records_++, reinterpret_cast<std::byte*>(nonce.data()));
  return nonce;
}

Status LinkCipher::Seal(ConstBytes head, ConstBytes rest, Bytes sealed) {
  const CryptoLibrary::Functions& crypto = library_->functions();
  const auto nonce = NextNonce();
  const Bytes text = sealed.Sub(0, head.size() + rest.size());
  int length = 0;
  if (crypto.encrypt_init(context_, nullptr, nullptr, nullptr, nonce.data()) != 1 ||
      !Update(crypto.encrypt_update, context_, head, text.data()) ||
      !Update(crypto.encrypt_update, context_, rest, text.data() + head.size()) ||
      crypto.encrypt_final(context_, Raw(text.end()), &length) != 1 ||
      crypto.control(context_, kGetTag, kCipherTagBytes, text.end()) != 1) {
    return LibraryFailure("encrypt");
  }
  return Status();
}

Status LinkCipher::Open(ConstBytes sealed, Bytes head, Bytes rest) {
  const CryptoLibrary::Functions& crypto = library_->functions();
  const auto nonce = NextNonce();
  const std::byte* const second = sealed.data() + head.size();
  auto* tag = const_cast<std::byte*>(second + rest.size());  // OpenSSL only reads the tag
  if (crypto.decrypt_init(context_, nullptr, nullptr, nullptr, nonce.data()) != 1 ||
      !Update(crypto.decrypt_update, context_, sealed.Sub(0, head.size()), head.data()) ||
      !Update(crypto.decrypt_update, context_, ConstBytes(second, rest.size()), rest.data()) ||
      crypto.control(context_, kSetTag, kCipherTagBytes, tag) != 1) {
    return LibraryFailure("decrypt");
  }
  std::array<unsigned char, kCipherTagBytes> none;  // GCM leaves nothing for the end
  int length = 0;
  if (crypto.decrypt_final(context_, none.data(), &length) == 1) return Status();
  return Status(StatusCode::kAuthentication, kAlteredData);
}

}  // namespace sparkhvd
