#include "base/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace sparkhvd {
namespace {

std::string Hex(const Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte value : digest) {
    text += kDigits[std::to_integer<size_t>(value >> 4)];
    text += kDigits[std::to_integer<size_t>(value & std::byte{15})];
  }
  return text;
}

std::string HashOf(const std::string& message) {
  Sha256 hash;
  hash.Update(AsBytes(message));
  return Hex(hash.Finish());
}

std::string HmacOf(const std::string& key, const std::string& message) {
  return Hex(HmacSha256(AsBytes(key), AsBytes(message)));
}

// The examples of FIPS 180-4 as NIST publishes them.
TEST(Sha256, ReturnsThePublishedDigests) {
  EXPECT_EQ(HashOf(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HashOf("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HashOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HashOf(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnTheChunksOfTheMessage) {
  std::string message;
  for (int i = 0; i < 200; ++i) message += static_cast<char>(i * 7);
  for (size_t length = 0; length <= message.size(); ++length) {
    const std::string part = message.substr(0, length);
    Sha256 hash;
    for (size_t i = 0; i < length; i += 13)
      hash.Update(AsBytes(std::string_view(part).substr(i, 13)));
    ASSERT_EQ(Hex(hash.Finish()), HashOf(part)) << "length " << length;
  }
}

// RFC 4231, test cases 1, 2, 3, 6 and 7.
TEST(HmacSha256, ReturnsTheDigestsOfRfc4231) {
  EXPECT_EQ(HmacOf(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(HmacOf("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(HmacOf(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(
      HmacOf(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(HmacOf(std::string(131, '\xaa'),
                   "This is a test using a larger than block-size key and a larger than block-size "
                   "data. The key needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(EqualInConstantTime, DetectsEveryDifference) {
  const std::string text = "0123456789abcdef";
  EXPECT_TRUE(EqualInConstantTime(AsBytes(text), AsBytes(std::string(text))));
  EXPECT_TRUE(EqualInConstantTime(AsBytes(""), AsBytes("")));
  EXPECT_FALSE(EqualInConstantTime(AsBytes(text), AsBytes(text.substr(1))));
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = static_cast<char>(other[i] ^ 1);
    EXPECT_FALSE(EqualInConstantTime(AsBytes(text), AsBytes(other))) << "byte " << i;
  }
}

}  // namespace
}  // namespace sparkhvd
