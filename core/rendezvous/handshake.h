// The handshake in which both ends of a connection prove that they know the job's token. Neither
// end reads anything else before the handshake.
//
//   dialer   -> acceptor  magic, nonce of the dialer, claim     (48 bytes)
//   acceptor -> dialer    nonce of the acceptor, its terms      (40 bytes)
//   dialer   -> acceptor  HMAC("dial", all of this, purpose)    (32 bytes)
//   acceptor -> dialer    HMAC("acpt", all of this, purpose)    (32 bytes)
//
// If the acceptor is full, or the dialer was too slow, the acceptor sends the beginning of
// BusyNotice instead of a welcome or a proof, and hangs up. The dialer then dials again. Nothing
// authenticates this message: an attacker who could forge it could also cut the connection.
//
// Both nonces are fresh, so a recording is worthless later. The labels "dial" and "acpt" prevent a
// proof from being reflected. The purpose, which both ends know and never send, prevents a
// connection from being redirected to another listener of the job. A stranger learns only a nonce.
// The proofs do not protect the data that follows: that requires encryption with the keys that the
// handshake derives.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/sha256.h"
#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

constexpr size_t kHelloBytes = 48;
constexpr size_t kNonceBytes = 32;
constexpr size_t kWelcomeBytes = 40;
constexpr size_t kProofBytes = 32;

// The secrets that both ends share after a handshake: a key for each direction, new for every
// connection. Also holds the acceptor's decision to encrypt.
struct SessionKeys {
  Digest from_dialer{};
  Digest from_acceptor{};
  bool encrypt = false;
};

// Returns the message of a busy acceptor. It is as long as the longest message that it replaces.
ConstBytes BusyNotice();
// Returns whether this message of the acceptor is the beginning of BusyNotice().
bool IsBusyNotice(ConstBytes message);

using Hello = std::array<std::byte, kHelloBytes>;
using Welcome = std::array<std::byte, kWelcomeBytes>;

// The acceptor's half. The socket's owner drives it and passes exactly wanted() bytes each time.
class AcceptorHandshake {
 public:
  // `encrypt` decides for both sides whether the connection is encrypted after the handshake. Ranks
  // agree on it through their address records.
  AcceptorHandshake(const std::string& token, const std::string& purpose, bool encrypt = false)
      : token_(token), purpose_(purpose), encrypt_(encrypt) {}

  size_t wanted() const { return hello_seen_ ? kProofBytes : kHelloBytes; }
  // Returns the reply to send. After kAuthentication, drop the dialer without an answer.
  Result<std::vector<std::byte>> Consume(ConstBytes message);
  // Returns the message to send before hanging up. It makes a member dial again.
  ConstBytes farewell() const {
    return BusyNotice().Sub(0, hello_seen_ ? kProofBytes : kWelcomeBytes);
  }
  bool done() const { return done_; }
  // Returns the dialer's claim. Valid once done().
  uint64_t claim() const;
  SessionKeys keys() const;  // valid once done()

 private:
  std::string token_;
  std::string purpose_;
  bool encrypt_;
  Hello hello_{};
  Welcome welcome_{};
  bool hello_seen_ = false;
  bool done_ = false;
};

// The dialer's half. Send the result of Start. Pass the acceptor's welcome to Prove and send the
// result. Then pass the acceptor's proof to Check.
class DialerHandshake {
 public:
  DialerHandshake(const std::string& token, const std::string& purpose, uint64_t claim)
      : token_(token), purpose_(purpose), claim_(claim) {}

  Result<Hello> Start();
  Digest Prove(const Welcome& welcome);
  // Fails with kAuthentication if the acceptor does not know the token.
  Status Check(const Digest& answer) const;
  SessionKeys keys() const;  // valid after Prove

 private:
  std::string token_;
  std::string purpose_;
  uint64_t claim_;
  Hello hello_{};
  Welcome welcome_{};
};

// Returns kAuthentication with the message that the other side closed the connection during the
// handshake.
Status HandshakeRefused();

}  // namespace sparkhvd
