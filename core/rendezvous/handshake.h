// How two ends of a connection prove to each other that they know the job's token, before anything
// else is read.
//
//   dialer   -> acceptor  magic, nonce of the dialer, claim     (48 bytes)
//   acceptor -> dialer    nonce of the acceptor, its terms      (40 bytes)
//   dialer   -> acceptor  HMAC("dial", all of this, purpose)    (32 bytes)
//   acceptor -> dialer    HMAC("acpt", all of this, purpose)    (32 bytes)
//
// In place of a welcome or a proof the acceptor may send the beginning of ComeAgain and hang up: it
// has no room, or the dialer was too slow. The dialer then dials again. Nothing authenticates that
// word: whoever could forge it could also cut the connection.
//
// Both nonces are fresh, so nothing recorded is worth anything later; the label keeps a proof from
// being reflected; the purpose (known to both, never sent) keeps a connection from being led to
// another listener of the job. A stranger learns only a nonce. The proofs do not protect what
// follows: that needs encryption, with the keys that come of the handshake.
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

// What both ends know after a handshake and nobody else: a key for each direction, new with every
// connection; and what the acceptor has decided.
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

// The acceptor's half, fed by whoever reads the socket: exactly wanted() bytes each time.
class AcceptorHandshake {
 public:
  // `encrypt`: both are to encrypt what follows. Ranks agree on that by their address records.
  AcceptorHandshake(const std::string& token, const std::string& purpose, bool encrypt = false)
      : token_(token), purpose_(purpose), encrypt_(encrypt) {}

  size_t wanted() const { return hello_seen_ ? kProofBytes : kHelloBytes; }
  // What to send back; kAuthentication when the dialer is to be dropped without an answer.
  Result<std::vector<std::byte>> Consume(ConstBytes message);
  // What to send before hanging up, so that a member dials again.
  ConstBytes farewell() const {
    return ComeAgain().Sub(0, hello_seen_ ? kProofBytes : kWelcomeBytes);
  }
  bool done() const { return done_; }
  // What the dialer says of itself; meaningful once done().
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

// The dialer's half: send what Start gives, then what Prove makes of the acceptor's welcome, then
// hand the acceptor's proof to Check.
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

// All of it over a connected socket. kAuthentication when the other side does not know the token
// (or refuses ours).
Status DialHandshake(int fd, const std::string& token, const std::string& purpose, uint64_t claim,
                     Deadline deadline);

}  // namespace sparkhvd
