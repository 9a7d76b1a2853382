#include "rendezvous/frames.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/wire.h"
#include "rendezvous/socket.h"

namespace sparkhvd {

Result<FrameProtection> FrameProtection::Make(const Digest& key, bool encrypt,
                                              LinkCipher::Use use) {
  FrameProtection protection;
  protection.key_ = key;
  if (encrypt) {
    auto library = CryptoLibrary::Load();
    if (!library.ok()) return library.status();
    auto cipher = LinkCipher::Make(library.value(), key, use);
    if (!cipher.ok()) return cipher.status();
    protection.cipher_.emplace(std::move(cipher).value());
  }
  return protection;
}

// Writes the frame's number where the tag will be, so that the HMAC covers payload and number
// without a copy of the payload.
Digest FrameProtection::NextTag(Bytes payload_and_tag) {
  const size_t size = payload_and_tag.size() - sizeof(Digest);
  StoreLittleEndian(frames_++, payload_and_tag.data() + size);
  return HmacSha256(ConstBytes(key_.data(), key_.size()),
                    payload_and_tag.Sub(0, size + sizeof(frames_)));
}

Status FrameProtection::Protect(ConstBytes head, ConstBytes rest, std::vector<std::byte>* out) {
  const size_t begin = out->size();
  const size_t size = head.size() + rest.size();
  out->resize(begin + size + overhead());
  const Bytes record(out->data() + begin, size + overhead());
  if (cipher_) return cipher_->Seal(head, rest, record);
  std::copy(head.begin(), head.end(), record.begin());
  std::copy(rest.begin(), rest.end(), record.begin() + head.size());
  const Digest tag = NextTag(record);
  std::copy(tag.begin(), tag.end(), record.begin() + size);
  return Status();
}

Result<Bytes> FrameProtection::Verify(Bytes record) {
  const Bytes payload = record.Sub(0, record.size() - overhead());
  if (cipher_) {
    SHVD_TRY(cipher_->Open(record, payload));
    return payload;
  }
  Digest received;
  std::copy(payload.end(), record.end(), received.begin());
  const Digest expected = NextTag(record);
  if (EqualInConstantTime(ConstBytes(received.data(), received.size()),
                          ConstBytes(expected.data(), expected.size()))) {
    return payload;
  }
  return Status(StatusCode::kAuthentication, "a frame was altered, replayed or omitted");
}

Result<FrameConnection> FrameConnection::Make(UniqueFd fd, const SessionKeys& keys, Side side,
                                              FrameLimits limits) {
  const bool dialed = side == Side::kDialer;
  auto outgoing = FrameProtection::Make(dialed ? keys.from_dialer : keys.from_acceptor,
                                        keys.encrypt, LinkCipher::Use::kSeal);
  if (!outgoing.ok()) return outgoing.status();
  auto incoming = FrameProtection::Make(dialed ? keys.from_acceptor : keys.from_dialer,
                                        keys.encrypt, LinkCipher::Use::kOpen);
  if (!incoming.ok()) return incoming.status();
  return FrameConnection(std::move(fd), std::move(outgoing).value(), std::move(incoming).value(),
                         limits);
}

FrameConnection::FrameConnection(UniqueFd fd, FrameProtection outgoing, FrameProtection incoming,
                                 FrameLimits limits)
    : fd_(std::move(fd)),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      limits_(limits),
      frame_deadline_(Deadline::Never()) {}

Status FrameConnection::Queue(ConstBytes head, ConstBytes rest) {
  const size_t size = head.size() + rest.size();
  if (size > limits_.max_bytes) {
    return Status(StatusCode::kInvalidArgument, "a frame of " + std::to_string(size) +
                                                    " bytes exceeds the limit of " +
                                                    std::to_string(limits_.max_bytes) + " bytes");
  }
  const size_t begin = output_.size();
  output_.reserve(begin + kFrameHeadBytes + size + outgoing_.overhead());
  output_.resize(begin + kFrameHeadBytes);
  StoreLittleEndian(static_cast<uint32_t>(size), output_.data() + begin);
  return outgoing_.Protect(head, rest, &output_);
}

Status FrameConnection::Flush() {
  while (HasOutput()) {
    auto count = WriteSome(fd(), ConstBytes(output_.data() + sent_, output_.size() - sent_));
    if (!count.ok()) return count.status();
    if (count.value() == 0) return Status();
    sent_ += count.value();
  }
  output_ = {};
  sent_ = 0;
  return Status();
}

Result<std::optional<std::string>> FrameConnection::Read() {
  while (true) {
    const bool in_head = received_ < head_.size();
    const Bytes part =
        in_head ? Bytes(head_.data(), head_.size()) : Bytes(body_.data(), body_.size());
    const size_t offset = in_head ? received_ : received_ - head_.size();
    auto count = ReadSome(fd(), part.Sub(offset, part.size() - offset));
    if (!count.ok()) return count.status();
    if (count.value() == 0) return std::optional<std::string>();
    if (received_ == 0) frame_deadline_ = Deadline::AfterSeconds(limits_.frame_seconds);
    received_ += count.value();
    if (received_ == head_.size()) SHVD_TRY(ReadLength());
    if (received_ < head_.size() + body_.size()) continue;
    if (in_head) continue;  // the body is never empty: it has a tag
    received_ = 0;
    auto payload = incoming_.Verify(Bytes(body_.data(), body_.size()));
    if (!payload.ok()) return payload.status();
    std::string frame(reinterpret_cast<const char*>(payload.value().data()),
                      payload.value().size());
    body_ = {};
    return std::optional<std::string>(std::move(frame));
  }
}

Status FrameConnection::ReadLength() {
  const auto length = LoadLittleEndian<uint32_t>(head_.data());
  if (length > limits_.max_bytes) {
    return Status(StatusCode::kAuthentication, "a frame announces " + std::to_string(length) +
                                                   " bytes; the limit is " +
                                                   std::to_string(limits_.max_bytes) + " bytes");
  }
  body_.resize(length + incoming_.overhead());
  return Status();
}

Status FrameConnection::Send(ConstBytes payload, Deadline deadline) {
  SHVD_TRY(Queue(payload));
  return AwaitFlushed(deadline);
}

Status FrameConnection::AwaitFlushed(Deadline deadline) {
  while (true) {
    SHVD_TRY(Flush());
    if (!HasOutput()) return Status();
    const Status ready = AwaitEvents(fd(), POLLOUT, deadline);
    if (ready.code() == StatusCode::kTimeout) {
      return Status(StatusCode::kTimeout, "the peer did not accept " +
                                              std::to_string(output_.size() - sent_) +
                                              " bytes before the deadline");
    }
    SHVD_TRY(ready);
  }
}

Result<std::string> FrameConnection::Receive(Deadline deadline) {
  while (true) {
    auto frame = Read();
    if (!frame.ok()) return frame.status();
    if (frame.value()) return *std::move(frame).value();
    const Deadline until = IsInFrame() ? Deadline::Earlier(deadline, frame_deadline_) : deadline;
    SHVD_TRY(AwaitEvents(fd(), POLLIN, until));
  }
}

Result<SessionKeys> AcceptHandshake(int fd, const std::string& token, const std::string& purpose,
                                    Deadline deadline) {
  AcceptorHandshake handshake(token, purpose);
  std::vector<std::byte> message;
  while (!handshake.done()) {
    message.resize(handshake.wanted());
    SHVD_TRY(ReadExactly(fd, Bytes(message.data(), message.size()), deadline));
    auto reply = handshake.Consume(ConstBytes(message.data(), message.size()));
    if (!reply.ok()) return reply.status();
    SHVD_TRY(WriteExactly(fd, ConstBytes(reply.value().data(), reply.value().size()), deadline));
  }
  return handshake.keys();
}

}  // namespace sparkhvd
