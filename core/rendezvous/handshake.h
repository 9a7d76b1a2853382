// How two ends of a connection prove to each other that they know the job's token, before anything
// else is read.
//
//   dialer   -> acceptor  magic, nonce of the dialer, claim     (48 bytes)
//   acceptor -> dialer    nonce of the acceptor, its terms      (40 bytes)
//   dialer   -> acceptor  HMAC("dial", all of this, purpose)    (32 bytes)
//   acceptor -> dialer    HMAC("acpt", all of this, purpose)    (32 bytes)
//
// Instead of a welcome or a proof the acceptor may send the beginning of ComeAgain and hang up: it
// is full, or the dialer was too slow. The dialer then dials again. Nothing authenticates this
// message: an attacker who could forge it could also cut the connection.
//
// Both nonces are fresh, so a recording is worthless later; the label prevents a proof from being
// reflected; the purpose (known to both, never sent) prevents a connection from being redirected to
// another listener of the job. A stranger learns only a nonce. The proofs do not protect the data
// that follows: that needs encryption, with the keys that the handshake derives.
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
// connection; and the acceptor's decision to encrypt.
struct SessionKeys {
  Digest from_dialer{};
  Digest from_acceptor{};
  bool encrypt = false;
};

// As long as the longest message that it replaces.
ConstBytes ComeAgain();
// Whether this message of the acceptor is the beginning of ComeAgain().
bool IsComeAgain(ConstBytes message);

using Hello = std::array<std::byte, kHelloBytes>;
using Welcome = std::array<std::byte, kWelcomeBytes>;

// The acceptor's half, driven by the owner of the socket: it takes exactly wanted() bytes each
// time.
class AcceptorHandshake {
 public:
  // `encrypt`: whether both sides encrypt from then on. Ranks agree on that by their address
  // records.
  AcceptorHandshake(const std::string& token, const std::string& purpose, bool encrypt = false)
      : token_(token), purpose_(purpose), encrypt_(encrypt) {}

  size_t wanted() const { return hello_seen_ ? kProofBytes : kHelloBytes; }
  // The reply to send; kAuthentication when the dialer is to be dropped without an answer.
  Result<std::vector<std::byte>> Consume(ConstBytes message);
  // The reply to send before hanging up, so that a member dials again.
  ConstBytes farewell() const {
    return ComeAgain().Sub(0, hello_seen_ ? kProofBytes : kWelcomeBytes);
  }
  bool done() const { return done_; }
  // The dialer's claim; meaningful once done().
  uint64_t claim() const;
  SessionKeys keys() const;  // likewise

 private:
  std::string token_;
  std::string purpose_;
  bool encrypt_;
  Hello hello_{};
  Welcome welcome_{};
  bool hello_seen_ = false;
  bool done_ = false;
};

// The dialer's half: send the result of Start, then the result of Prove for the acceptor's welcome,
// then pass the acceptor's proof to Check.
class DialerHandshake {
 public:
  DialerHandshake(const std::string& token, const std::string& purpose, uint64_t claim)
      : token_(token), purpose_(purpose), claim_(claim) {}

  Result<Hello> Start();
  Digest Prove(const Welcome& welcome);
  // kAuthentication when the other side does not know the token.
  Status Check(const Digest& answer) const;
  SessionKeys keys() const;  // once Prove has been called

 private:
  std::string token_;
  std::string purpose_;
  uint64_t claim_;
  Hello hello_{};
  Welcome welcome_{};
};

// kAuthentication: the other side closed the connection during the handshake.
Status HandshakeRefused();

// Runs the whole handshake over a connected socket. kAuthentication when the other side does not
// know the token (or refuses ours).
Status DialHandshake(int fd, const std::string& token, const std::string& purpose, uint64_t claim,
                     Deadline deadline);

}  // namespace sparkhvd
