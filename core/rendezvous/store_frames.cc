#include "rendezvous/store_frames.h"

#include <utility>

#include "base/wire.h"

namespace sparkhvd {

std::array<std::byte, kStoreRequestBytes> EncodeStoreRequest(const StoreRequestHeader& header) {
  std::array<std::byte, kStoreRequestBytes> bytes;
  StoreLittleEndian(static_cast<uint32_t>(header.request), bytes.data());
  StoreLittleEndian(header.key_bytes, bytes.data() + 4);
  StoreLittleEndian(header.value_bytes, bytes.data() + 8);
  return bytes;
}

Result<StoreRequestHeader> DecodeStoreRequest(ConstBytes bytes) {
  if (bytes.size() != kStoreRequestBytes) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous request has the wrong length");
  }
  StoreRequestHeader header;
  header.request = static_cast<StoreRequest>(LoadLittleEndian<uint32_t>(bytes.data()));
  header.key_bytes = LoadLittleEndian<uint32_t>(bytes.data() + 4);
  header.value_bytes = LoadLittleEndian<uint32_t>(bytes.data() + 8);
  const bool known = header.request == StoreRequest::kSet ||
                     header.request == StoreRequest::kWill ||
                     (header.request == StoreRequest::kGet && header.value_bytes == 0);
  if (!known || header.key_bytes > kMaxKeyBytes || header.value_bytes > kMaxValueBytes) {
    return Status(StatusCode::kInvalidArgument, "malformed rendezvous request");
  }
  return header;
}

Result<StoreCipher> StoreCipher::Make(const Digest& sending, const Digest& receiving) {
  auto library = CryptoLibrary::Load();
  if (!library.ok()) return library.status();
  auto sealing = LinkCipher::Make(library.value(), sending, LinkCipher::Use::kSeal);
  if (!sealing.ok()) return sealing.status();
  auto opening = LinkCipher::Make(library.value(), receiving, LinkCipher::Use::kOpen);
  if (!opening.ok()) return opening.status();
  StoreCipher cipher;
  cipher.sealing_.emplace(std::move(sealing).value());
  cipher.opening_.emplace(std::move(opening).value());
  return cipher;
}

Status StoreCipher::Seal(ConstBytes plain, std::vector<std::byte>* out) {
  if (!sealing_) {
    out->insert(out->end(), plain.begin(), plain.end());
    return Status();
  }
  const size_t begin = out->size();
  out->resize(begin + plain.size() + overhead());
  return sealing_->Seal(plain, Bytes(out->data() + begin, plain.size() + overhead()));
}

Result<Bytes> StoreCipher::Open(Bytes sealed) {
  const Bytes content = sealed.Sub(0, sealed.size() - overhead());
  if (opening_) SHVD_TRY(opening_->Open(sealed, content));
  return content;
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
