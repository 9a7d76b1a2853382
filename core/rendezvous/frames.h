// Frames on an authenticated connection. The rendezvous and the messages between driver and tasks
// use the same frames.
//
// A frame is the length of its payload (4 bytes), the payload and a tag. Every frame is
// authenticated with a key that belongs to one direction of one connection, and with its number in
// that direction. So an altered, omitted, repeated, reordered or reflected frame fails
// authentication. The tag is the HMAC-SHA256 of payload and number, or the tag of AES-256-GCM if
// the acceptor encrypts. The length is checked against a limit before memory is allocated. A
// changed length makes the receiver check the wrong bytes, so such a frame fails, too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/link_cipher.h"
#include "base/sha256.h"
#include "base/span.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "rendezvous/handshake.h"

namespace sparkhvd {

constexpr size_t kFrameHeadBytes = 4;
constexpr double kNoLimit = 3.0e9;  // seconds, a century

enum class Side { kDialer, kAcceptor };

struct FrameLimits {
  size_t max_bytes;                 // of a payload
  double frame_seconds = kNoLimit;  // from a frame's first byte to its last
};

// Protects the payloads of one direction.
class FrameProtection {
 public:
  // Fails with kIo if the connection is encrypted and OpenSSL is missing.
  static Result<FrameProtection> Make(const Digest& key, bool encrypt, LinkCipher::Use use);

  size_t overhead() const { return cipher_ ? kCipherTagBytes : sizeof(Digest); }
  // Appends the protected payload, which consists of two parts, to `out`.
  Status Protect(ConstBytes head, ConstBytes rest, std::vector<std::byte>* out);
  // Returns the payload, at the beginning of `record`. Fails with kAuthentication unless the peer
  // sent `record` as its next frame.
  Result<Bytes> Verify(Bytes record);

 private:
  Digest NextTag(Bytes payload_and_tag);

  Digest key_{};
  std::optional<LinkCipher> cipher_;
  uint64_t frames_ = 0;
};

// One authenticated connection. One thread may send while another receives.
class FrameConnection {
 public:
  static Result<FrameConnection> Make(UniqueFd fd, const SessionKeys& keys, Side side,
                                      FrameLimits limits);

  int fd() const { return fd_.get(); }
  void Close() { fd_.Reset(); }

  // The following functions never wait, and fail with kPeerLost once the connection has ended. Read
  // returns the next frame once it is complete.
  // Queue fails with kInvalidArgument for a payload above the limit. The payload may have two
  // parts.
  Status Queue(ConstBytes head, ConstBytes rest = {});
  Status Flush();
  bool HasOutput() const { return sent_ < output_.size(); }
  Result<std::optional<std::string>> Read();
  // Returns whether a frame has begun to arrive but is not complete within its time limit.
  bool IsFrameLate() const { return received_ > 0 && frame_deadline_.Expired(); }
  bool IsInFrame() const { return received_ > 0; }

  // The following functions wait. After kTimeout, another call of AwaitFlushed or Receive
  // continues.
  Status Send(ConstBytes payload, Deadline deadline);
  Status AwaitFlushed(Deadline deadline);
  Result<std::string> Receive(Deadline deadline);

 private:
  FrameConnection(UniqueFd fd, FrameProtection outgoing, FrameProtection incoming,
                  FrameLimits limits);
  Status ReadLength();

  UniqueFd fd_;
  FrameProtection outgoing_;
  FrameProtection incoming_;
  FrameLimits limits_;
  std::vector<std::byte> output_;
  size_t sent_ = 0;  // of output_
  std::array<std::byte, kFrameHeadBytes> head_{};
  std::vector<std::byte> body_;
  size_t received_ = 0;  // of head_ and body_
  Deadline frame_deadline_;
};

// Runs the acceptor's half of the handshake over a connected socket. Fails with kAuthentication if
// the dialer does not know the token.
Result<SessionKeys> AcceptHandshake(int fd, const std::string& token, const std::string& purpose,
                                    Deadline deadline);

}  // namespace sparkhvd
