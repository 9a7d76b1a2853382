#include "base/link_cipher.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>

namespace sparkhvd {
namespace {

TEST(LinkCipher, MatchesThePublishedVector) {
  // AES-256-GCM with a key, a nonce and a block of zeros (case 14 of the GCM specification).
  auto library = CryptoLibrary::Load();
  ASSERT_TRUE(library.ok()) << library.status().message();
  auto cipher = LinkCipher::Make(library.value(), Digest{}, LinkCipher::Use::kSeal);
  ASSERT_TRUE(cipher.ok());
  const std::array<std::byte, 16> zeros{};
  std::array<std::byte, 32> sealed{};
  ASSERT_TRUE(cipher.value().Seal(ConstBytes(zeros.data(), 16), {}, Bytes(sealed.data(), 32)).ok());
  std::string text;
  for (const std::byte value : sealed) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", std::to_integer<unsigned>(value));
    text += digits;
  }
  EXPECT_EQ(text, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919");
}

TEST(LinkCipher, NamesTheMissingLibrary) {
  const auto none = CryptoLibrary::Load({"libno-such-crypto.so.7"});
  EXPECT_EQ(none.status().code(), StatusCode::kIo);
  EXPECT_EQ(none.status().message(),
            "encryption needs OpenSSL's libno-such-crypto.so.7, which this host does not have; "
            "install OpenSSL on every host or turn encryption off");
}

TEST(LinkCipher, CutsTheContentIntoPartsAnywhere) {
  auto library = CryptoLibrary::Load();
  ASSERT_TRUE(library.ok()) << library.status().message();
  auto seal = LinkCipher::Make(library.value(), Digest{}, LinkCipher::Use::kSeal);
  auto open = LinkCipher::Make(library.value(), Digest{}, LinkCipher::Use::kOpen);
  ASSERT_TRUE(seal.ok() && open.ok());
  std::array<std::byte, 200> content;
  for (size_t i = 0; i < content.size(); ++i) content[i] = std::byte(i);
  std::array<std::byte, 200 + kCipherTagBytes> sealed;
  for (size_t cut = 0; cut <= content.size(); cut += 8) {
    const size_t left = content.size() - cut;
    const ConstBytes all(content.data(), content.size());
    ASSERT_TRUE(seal.value()
                    .Seal(all.Sub(0, cut), all.Sub(cut, left), Bytes(sealed.data(), sealed.size()))
                    .ok());
    std::array<std::byte, 200> opened{};
    const Bytes whole(opened.data(), opened.size());
    const size_t first = left;  // opened with another cut
    ASSERT_TRUE(open.value()
                    .Open(ConstBytes(sealed.data(), sealed.size()), whole.Sub(0, first),
                          whole.Sub(first, cut))
                    .ok());
    EXPECT_EQ(opened, content) << cut;
  }
  sealed[7] ^= std::byte(1);
  std::array<std::byte, 200> opened{};
  const Status altered = open.value().Open(ConstBytes(sealed.data(), sealed.size()),
                                           Bytes(opened.data(), opened.size()));
  EXPECT_EQ(altered.code(), StatusCode::kAuthentication);
  EXPECT_EQ(altered.message(), "data from the link was altered in transit");
}

}  // namespace
}  // namespace sparkhvd
