#include "rendezvous/handshake.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "base/wire.h"
#include "rendezvous/socket.h"

namespace sparkhvd {
namespace {

constexpr uint64_t kMagic = 0x3353482064766873;  // "shvd HS3", changes with the frames
constexpr size_t kClaimOffset = kHelloBytes - sizeof(uint64_t);
constexpr size_t kTermsOffset = kWelcomeBytes - sizeof(uint64_t);
constexpr uint64_t kEncrypt = 1;
constexpr char kBusyNotice[kWelcomeBytes + 1] = "sparkhvd: no room now; please dial again";

Digest Proof(const std::string& token, const char* label, const Hello& hello,
             const Welcome& welcome, const std::string& purpose) {
  std::vector<std::byte> message;
  message.reserve(4 + hello.size() + welcome.size() + purpose.size());
  const auto append = [&message](ConstBytes part) {
    message.insert(message.end(), part.begin(), part.end());
  };
  // Everything before the purpose has a fixed length, so the fields are unambiguous.
  append(AsBytes(label));
  append(ConstBytes(hello.data(), hello.size()));
  append(ConstBytes(welcome.data(), welcome.size()));
  append(AsBytes(purpose));
  return HmacSha256(AsBytes(token), ConstBytes(message.data(), message.size()));
}

SessionKeys KeysOf(const std::string& token, const Hello& hello, const Welcome& welcome,
                   const std::string& purpose) {
  return {Proof(token, "kdia", hello, welcome, purpose),
          Proof(token, "kacp", hello, welcome, purpose),
          LoadLittleEndian<uint64_t>(welcome.data() + kTermsOffset) == kEncrypt};
}

Status CheckToken(const std::string& token) {
  if (!token.empty()) return Status();
  return Status(StatusCode::kInvalidArgument, "an authenticated connection needs the job's token");
}

}  // namespace

ConstBytes BusyNotice() { return AsBytes(std::string_view(kBusyNotice, kWelcomeBytes)); }

bool IsBusyNotice(ConstBytes message) {
  const ConstBytes expected = BusyNotice();
  return message.size() <= expected.size() &&
         std::equal(message.begin(), message.end(), expected.begin());
}

Result<std::vector<std::byte>> AcceptorHandshake::Consume(ConstBytes message) {
  if (message.size() != wanted() || done_) {
    return Status(StatusCode::kInternal, "a handshake message has the wrong length");
  }
  SHVD_TRY(CheckToken(token_));
  if (!hello_seen_) {
    if (LoadLittleEndian<uint64_t>(message.data()) != kMagic) {
      return Status(StatusCode::kAuthentication, "the dialer does not speak this protocol");
    }
    std::copy(message.begin(), message.end(), hello_.begin());
    SHVD_TRY(FillRandom(Bytes(welcome_.data(), kNonceBytes)));
    StoreLittleEndian(encrypt_ ? kEncrypt : 0, welcome_.data() + kTermsOffset);
    hello_seen_ = true;
    return std::vector<std::byte>(welcome_.begin(), welcome_.end());
  }
  const Digest expected = Proof(token_, "dial", hello_, welcome_, purpose_);
  if (!EqualInConstantTime(message, ConstBytes(expected.data(), expected.size()))) {
    return Status(StatusCode::kAuthentication, "the dialer does not know the job's token");
  }
  done_ = true;
  const Digest proof = Proof(token_, "acpt", hello_, welcome_, purpose_);
  return std::vector<std::byte>(proof.begin(), proof.end());
}

uint64_t AcceptorHandshake::claim() const {
  return LoadLittleEndian<uint64_t>(hello_.data() + kClaimOffset);
}

SessionKeys AcceptorHandshake::keys() const { return KeysOf(token_, hello_, welcome_, purpose_); }

SessionKeys DialerHandshake::keys() const { return KeysOf(token_, hello_, welcome_, purpose_); }

Result<Hello> DialerHandshake::Start() {
  SHVD_TRY(CheckToken(token_));
  StoreLittleEndian(kMagic, hello_.data());
  SHVD_TRY(FillRandom(Bytes(hello_.data() + sizeof(kMagic), kNonceBytes)));
  StoreLittleEndian(claim_, hello_.data() + kClaimOffset);
  return hello_;
}

Digest DialerHandshake::Prove(const Welcome& welcome) {
  welcome_ = welcome;
  return Proof(token_, "dial", hello_, welcome_, purpose_);
}

Status DialerHandshake::Check(const Digest& answer) const {
  const Digest expected = Proof(token_, "acpt", hello_, welcome_, purpose_);
  if (EqualInConstantTime(ConstBytes(answer.data(), answer.size()),
                          ConstBytes(expected.data(), expected.size()))) {
    return Status();
  }
  return Status(StatusCode::kAuthentication, "the other side does not know the job's token");
}

Status HandshakeRefused() {
  return Status(
      StatusCode::kAuthentication,
      "the other side closed the connection instead of proving that it knows the job's token; "
      "both sides need the same token");
}

}  // namespace sparkhvd
