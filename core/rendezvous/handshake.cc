#include "rendezvous/handshake.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "base/wire.h"
#include "rendezvous/socket.h"

namespace sparkhvd {
namespace {

constexpr uint64_t kMagic = 0x3153482064766873;  // "shvd HS1"
constexpr size_t kClaimOffset = kHelloBytes - sizeof(uint64_t);

Digest Proof(const std::string& token, const char* label, ConstBytes hello, const Digest& nonce,
             const std::string& purpose) {
  std::vector<std::byte> message;
  message.reserve(4 + hello.size() + nonce.size() + purpose.size());
  const auto append = [&message](ConstBytes part) {
    message.insert(message.end(), part.begin(), part.end());
  };
  // Everything before the purpose has a fixed length, so the parts cannot be confused.
  append(AsBytes(label));
  append(hello);
  append(ConstBytes(nonce.data(), nonce.size()));
  append(AsBytes(purpose));
  return HmacSha256(AsBytes(token), ConstBytes(message.data(), message.size()));
}

SessionKeys KeysOf(const std::string& token, ConstBytes hello, const Digest& nonce,
                   const std::string& purpose) {
  return {Proof(token, "kdia", hello, nonce, purpose), Proof(token, "kacp", hello, nonce, purpose)};
}

Status CheckToken(const std::string& token) {
  if (!token.empty()) return Status();
  return Status(StatusCode::kInvalidArgument, "an authenticated connection needs the job's token");
}

}  // namespace

Result<Digest> AcceptorHandshake::Consume(ConstBytes message) {
  if (message.size() != wanted() || done_) {
    return Status(StatusCode::kInternal, "handshake message of the wrong length");
  }
  SHVD_TRY(CheckToken(token_));
  if (!hello_seen_) {
    if (LoadLittleEndian<uint64_t>(message.data()) != kMagic) {
      return Status(StatusCode::kAuthentication, "the dialer does not speak this protocol");
    }
    std::copy(message.begin(), message.end(), hello_.begin());
    SHVD_TRY(FillRandom(Bytes(nonce_.data(), nonce_.size())));
    hello_seen_ = true;
    return nonce_;
  }
  const ConstBytes hello(hello_.data(), hello_.size());
  const Digest expected = Proof(token_, "dial", hello, nonce_, purpose_);
  if (!EqualInConstantTime(message, ConstBytes(expected.data(), expected.size()))) {
    return Status(StatusCode::kAuthentication, "the dialer does not know the job's token");
  }
  done_ = true;
  return Proof(token_, "acpt", hello, nonce_, purpose_);
}

uint64_t AcceptorHandshake::claim() const {
  return LoadLittleEndian<uint64_t>(hello_.data() + kClaimOffset);
}

SessionKeys AcceptorHandshake::keys() const {
  return KeysOf(token_, ConstBytes(hello_.data(), hello_.size()), nonce_, purpose_);
}

SessionKeys DialerHandshake::keys() const {
  return KeysOf(token_, ConstBytes(hello_.data(), hello_.size()), nonce_, purpose_);
}

Result<std::array<std::byte, kHelloBytes>> DialerHandshake::Start() {
  SHVD_TRY(CheckToken(token_));
  StoreLittleEndian(kMagic, hello_.data());
  SHVD_TRY(FillRandom(Bytes(hello_.data() + sizeof(kMagic), kNonceBytes)));
  StoreLittleEndian(claim_, hello_.data() + kClaimOffset);
  return hello_;
}

Digest DialerHandshake::Prove(const Digest& nonce) {
  nonce_ = nonce;
  return Proof(token_, "dial", ConstBytes(hello_.data(), hello_.size()), nonce_, purpose_);
}

Status DialerHandshake::Check(const Digest& answer) const {
  const Digest expected =
      Proof(token_, "acpt", ConstBytes(hello_.data(), hello_.size()), nonce_, purpose_);
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

Status DialHandshake(int fd, const std::string& token, const std::string& purpose, uint64_t claim,
                     Deadline deadline) {
  DialerHandshake handshake(token, purpose, claim);
  const auto hello = handshake.Start();
  SHVD_TRY(hello.status());
  SHVD_TRY(WriteExactly(fd, ConstBytes(hello.value().data(), hello.value().size()), deadline)
               .Annotate("handshake"));
  Digest nonce{};
  SHVD_TRY(ReadExactly(fd, Bytes(nonce.data(), nonce.size()), deadline).Annotate("handshake"));
  const Digest proof = handshake.Prove(nonce);
  Digest answer{};
  Status status = WriteExactly(fd, ConstBytes(proof.data(), proof.size()), deadline);
  if (status.ok()) status = ReadExactly(fd, Bytes(answer.data(), answer.size()), deadline);
  if (status.code() == StatusCode::kPeerLost) return HandshakeRefused();
  SHVD_TRY(status.Annotate("handshake"));
  return handshake.Check(answer);
}

}  // namespace sparkhvd
