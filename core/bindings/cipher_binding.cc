#include "bindings/cipher_binding.h"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/link_cipher.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace sparkhvd::bindings {
namespace {

// One class per direction, because a key serves only one direction.
template <LinkCipher::Use kUse>
struct OneWay {
  LinkCipher cipher;
};
using Sealer = OneWay<LinkCipher::Use::kSeal>;
using Opener = OneWay<LinkCipher::Use::kOpen>;

template <LinkCipher::Use kUse>
std::unique_ptr<OneWay<kUse>> Make(const std::string& key) {
  Digest digest;
  if (key.size() != digest.size()) {
    Check(Status(StatusCode::kInvalidArgument,
                 "a key must have " + std::to_string(digest.size()) + " bytes"));
  }
  const ConstBytes bytes = AsBytes(key);
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  auto cipher = Take(LinkCipher::Make(Take(CryptoLibrary::Load()), digest, kUse));
  return std::make_unique<OneWay<kUse>>(OneWay<kUse>{std::move(cipher)});
}

Bytes Writable(std::string& text) {
  return Bytes(reinterpret_cast<std::byte*>(text.data()), text.size());
}

py::bytes Seal(Sealer& sealer, std::string_view plain) {
  std::string sealed(plain.size() + kCipherTagBytes, '\0');
  Check(sealer.cipher.Seal(AsBytes(plain), Writable(sealed)));
  return py::bytes(sealed);
}

py::bytes Open(Opener& opener, std::string_view sealed) {
  if (sealed.size() < kCipherTagBytes) {
    Check(Status(StatusCode::kAuthentication, "a sealed record is too short"));
  }
  std::string plain(sealed.size() - kCipherTagBytes, '\0');
  Check(opener.cipher.Open(AsBytes(sealed), Writable(plain)));
  return py::bytes(plain);
}

}  // namespace

void RegisterCiphers(py::module_& module) {
  using py::arg;
  module.attr("CIPHER_TAG_BYTES") = kCipherTagBytes;
  py::class_<Sealer>(module, "Sealer")
      .def(py::init(&Make<LinkCipher::Use::kSeal>), arg("key"))
      .def("seal", &Seal, arg("plain"));
  py::class_<Opener>(module, "Opener")
      .def(py::init(&Make<LinkCipher::Use::kOpen>), arg("key"))
      .def("open", &Open, arg("sealed"));
}

}  // namespace sparkhvd::bindings
