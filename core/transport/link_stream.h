// The bytes of a link: a connected stream socket, whose content may be encrypted.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/sha256.h"
#include "base/span.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace sparkhvd {

// The keys of one side.
struct LinkKeys {
  Digest sending;
  Digest receiving;
};

// The memory for records that have been sent or received only in part. A link uses memory only
// while it has such a record, because most links of a large job are idle most of the time. Only one
// thread at a time may use the streams that share these buffers.
class RecordBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  RecordBuffers();
  Buffer Take();
  void Return(Buffer buffer);

 private:
  std::vector<Buffer> spare_;
};

// A non-blocking stream. With keys, its content travels in records
//
//   length of the content (4 bytes), content, tag (16 bytes)
//
// A LinkCipher seals the records of each direction. It numbers them, so a record that was altered,
// omitted, repeated or reordered fails authentication. The length is not encrypted; if it was
// altered, the reader checks the wrong bytes, and authentication fails, too. Nothing after such a
// record can be read.
class LinkStream {
 public:
  // Fails if there are keys and OpenSSL is missing.
  static Result<LinkStream> Make(UniqueFd socket, const std::optional<LinkKeys>& keys,
                                 const std::shared_ptr<RecordBuffers>& buffers);
  LinkStream(LinkStream&&) noexcept;
  LinkStream& operator=(LinkStream&&) noexcept;
  ~LinkStream();

  int fd() const { return socket_.get(); }
  bool connected() const { return socket_.valid(); }

  // The following functions move bytes from or to the two parts without waiting, and return how
  // many. They return 0 if the socket is not ready, and fail with kPeerLost once it has ended.
  //
  // Bytes count as written when their record has left this process. Until then, call Write with
  // the same bytes again; a record is sealed only once.
  Result<size_t> Write(ConstBytes head, ConstBytes rest = {});
  // The bytes that it counts are authentic. It may overwrite the parts beyond them. It may return
  // more bytes without any from the socket, so call it until it returns 0 before you poll.
  Result<size_t> Read(Bytes head, Bytes rest = {});
  // Whether the bytes of the next Write have been sealed, and perhaps partly sent.
  bool is_in_record() const;

 private:
  struct Records;
  LinkStream(UniqueFd socket, std::unique_ptr<Records> records);

  UniqueFd socket_;
  std::unique_ptr<Records> records_;  // null without keys
};

}  // namespace sparkhvd
