#include "transport/link_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/io_status.h"
#include "base/link_cipher.h"
#include "base/wire.h"
#include "transport/failures.h"

namespace sparkhvd {
namespace {

constexpr size_t kLengthBytes = 4;
// A whole record fits into one packet of the kernel, of at most 64 KiB. Records of 32 KiB and of
// 128 KiB took at least 15 % more processor time over a loopback.
constexpr size_t kContentBytes = size_t{62} << 10;
constexpr size_t kRecordBytes = kLengthBytes + kContentBytes + kCipherTagBytes;
// A buffer also takes the length of the record that follows. So one system call per record reads
// both.
constexpr size_t kBufferBytes = kRecordBytes + kLengthBytes;
constexpr size_t kSpareBuffers = 4;  // enough for two links, as in a ring

// Converts the result of sendmsg or recvmsg.
Result<size_t> Moved(ssize_t count) {
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0) return Status(StatusCode::kPeerLost, kClosedLinks);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return size_t{0};
  return Status(StatusCode::kPeerLost, ErrorText(errno), errno);
}

// Two parts in the form that sendmsg and recvmsg take.
class Message {
 public:
  Message(Bytes head, Bytes rest) {
    message_.msg_iov = parts_.data();
    for (const Bytes& part : {head, rest}) {
      if (!part.empty()) parts_[message_.msg_iovlen++] = {part.data(), part.size()};
    }
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  msghdr* get() { return &message_; }

 private:
  std::array<iovec, 2> parts_{};
  msghdr message_{};
};

Bytes Mutable(ConstBytes data) { return {const_cast<std::byte*>(data.data()), data.size()}; }

// A buffer that is taken when it is needed.
class RecordBuffer {
 public:
  explicit RecordBuffer(std::shared_ptr<RecordBuffers> all) : all_(std::move(all)) {}

  std::byte* Get() {
    if (!bytes_) bytes_ = all_->Take();
    return bytes_.get();
  }
  void Free() {
    if (bytes_) all_->Return(std::move(bytes_));
  }

 private:
  std::shared_ptr<RecordBuffers> all_;
  RecordBuffers::Buffer bytes_;
};

class Sealing {
 public:
  Sealing(LinkCipher cipher, std::shared_ptr<RecordBuffers> buffers)
      : cipher_(std::move(cipher)), buffer_(std::move(buffers)) {}

  bool is_in_record() const { return sent_ < end_; }

  Result<size_t> Write(int fd, ConstBytes head, ConstBytes rest) {
    if (!is_in_record()) SHVD_TRY(Seal(head, rest));
    auto count = Moved(::send(fd, buffer_.Get() + sent_, end_ - sent_, MSG_NOSIGNAL));
    if (!count.ok()) return count;
    sent_ += count.value();
    if (is_in_record()) return size_t{0};
    buffer_.Free();
    return end_ - kLengthBytes - kCipherTagBytes;
  }

 private:
  Status Seal(ConstBytes head, ConstBytes rest) {
    const size_t first = std::min(head.size(), kContentBytes);
    const size_t second = std::min(rest.size(), kContentBytes - first);
    const size_t content = first + second;
    std::byte* const record = buffer_.Get();
    StoreLittleEndian(static_cast<uint32_t>(content), record);
    SHVD_TRY(cipher_.Seal(head.Sub(0, first), rest.Sub(0, second),
                          Bytes(record + kLengthBytes, content + kCipherTagBytes)));
    sent_ = 0;
    end_ = kLengthBytes + content + kCipherTagBytes;
    return Status();
  }

  LinkCipher cipher_;
  RecordBuffer buffer_;
  size_t sent_ = 0;  // of the record in the buffer
  size_t end_ = 0;
};

class Opening {
 public:
  Opening(LinkCipher cipher, std::shared_ptr<RecordBuffers> buffers)
      : cipher_(std::move(cipher)), buffer_(std::move(buffers)) {}

  Result<size_t> Read(int fd, Bytes head, Bytes rest) {
    if (!failure_.ok()) return failure_;
    auto count = ReadNext(fd, head, rest);
    if (!count.ok()) failure_ = count.status();
    if (begin_ == end_) buffer_.Free();
    return count;
  }

 private:
  Result<size_t> ReadNext(int fd, Bytes head, Bytes rest) {
    if (opened_ > 0) return HandOut(head, rest);
    auto content = ArrivedContent();
    if (content.ok() && content.value() == 0) {
      SHVD_TRY(Receive(fd));
      content = ArrivedContent();
    }
    if (!content.ok() || content.value() == 0) return content;
    return Open(content.value(), head, rest);
  }

  // Returns the length of the content if the next record has arrived completely, otherwise 0.
  Result<size_t> ArrivedContent() {
    const size_t received = end_ - begin_;
    if (received < kLengthBytes) return size_t{0};
    const size_t content = LoadLittleEndian<uint32_t>(buffer_.Get() + begin_);
    if (content == 0 || content > kContentBytes) {
      return Status(StatusCode::kAuthentication, kAlteredData);
    }
    return received < kLengthBytes + content + kCipherTagBytes ? size_t{0} : content;
  }

  // Receives once. The buffer has room for the rest of the record.
  Status Receive(int fd) {
    std::byte* const bytes = buffer_.Get();
    if (begin_ > 0) std::memmove(bytes, bytes + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    auto count = Moved(::recv(fd, bytes + end_, kBufferBytes - end_, 0));
    if (count.ok()) end_ += count.value();
    return count.status();
  }

  Result<size_t> Open(size_t content, Bytes head, Bytes rest) {
    std::byte* const record = buffer_.Get() + begin_ + kLengthBytes;
    const ConstBytes sealed(record, content + kCipherTagBytes);
    begin_ += kLengthBytes;
    if (content > head.size() + rest.size()) {
      SHVD_TRY(cipher_.Open(sealed, Bytes(record, content)));
      opened_ = content;
      return HandOut(head, rest);
    }
    const size_t first = std::min(head.size(), content);
    SHVD_TRY(cipher_.Open(sealed, head.Sub(0, first), rest.Sub(0, content - first)));
    begin_ += sealed.size();
    return content;
  }

  Result<size_t> HandOut(Bytes head, Bytes rest) {
    size_t moved = 0;
    for (const Bytes& part : {head, rest}) {
      const size_t size = std::min(part.size(), opened_ - moved);
      std::copy_n(buffer_.Get() + begin_ + moved, size, part.data());
      moved += size;
    }
    opened_ -= moved;
    begin_ += moved + (opened_ == 0 ? kCipherTagBytes : 0);
    return moved;
  }

  LinkCipher cipher_;
  RecordBuffer buffer_;
  size_t begin_ = 0;  // of the received bytes in the buffer
  size_t end_ = 0;
  size_t opened_ = 0;  // bytes from begin_ on that a reader has not wanted yet
  Status failure_;
};

}  // namespace

RecordBuffers::RecordBuffers() { spare_.reserve(kSpareBuffers); }  // so that Return cannot fail

RecordBuffers::Buffer RecordBuffers::Take() {
  if (spare_.empty()) return Buffer(new std::byte[kBufferBytes]);
  Buffer buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

void RecordBuffers::Return(Buffer buffer) {
  if (spare_.size() < kSpareBuffers) spare_.push_back(std::move(buffer));
}

struct LinkStream::Records {
  Sealing sealing;
  Opening opening;
};

Result<LinkStream> LinkStream::Make(UniqueFd socket, const std::optional<LinkKeys>& keys,
                                    const std::shared_ptr<RecordBuffers>& buffers) {
  if (!keys) return LinkStream(std::move(socket), nullptr);
  auto library = CryptoLibrary::Load();
  if (!library.ok()) return library.status();
  auto seal = LinkCipher::Make(library.value(), keys->sending, LinkCipher::Use::kSeal);
  if (!seal.ok()) return seal.status();
  auto open = LinkCipher::Make(library.value(), keys->receiving, LinkCipher::Use::kOpen);
  if (!open.ok()) return open.status();
  return LinkStream(std::move(socket),
                    std::unique_ptr<Records>(new Records{{std::move(seal).value(), buffers},
                                                         {std::move(open).value(), buffers}}));
}

LinkStream::LinkStream(UniqueFd socket, std::unique_ptr<Records> records)
    : socket_(std::move(socket)), records_(std::move(records)) {}
LinkStream::LinkStream(LinkStream&&) noexcept = default;
LinkStream& LinkStream::operator=(LinkStream&&) noexcept = default;
LinkStream::~LinkStream() = default;

bool LinkStream::is_in_record() const { return records_ && records_->sealing.is_in_record(); }

Result<size_t> LinkStream::Write(ConstBytes head, ConstBytes rest) {
  if (records_) return records_->sealing.Write(fd(), head, rest);
  return Moved(::sendmsg(fd(), Message(Mutable(head), Mutable(rest)).get(), MSG_NOSIGNAL));
}

Result<size_t> LinkStream::Read(Bytes head, Bytes rest) {
  if (records_) return records_->opening.Read(fd(), head, rest);
  return Moved(::recvmsg(fd(), Message(head, rest).get(), 0));
}

}  // namespace sparkhvd
