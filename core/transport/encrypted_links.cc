#include "transport/encrypted_links.h"

#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "base/io_status.h"
#include "base/link_cipher.h"
#include "base/wire.h"

namespace sparkhvd {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kContentBytes = size_t{128} << 10;
constexpr size_t kRecordBytes = kLengthBytes + kContentBytes + kCipherTagBytes;
// The gap before a record in its buffer, which aligns the content.
constexpr size_t kMargin = alignof(std::max_align_t) - kLengthBytes;
// How long the last data waits for a peer that does not read.
constexpr std::chrono::milliseconds kFarewellTime(1000);
constexpr int kFarewellSliceMillis = 20;  // poll does not report acknowledgements

// Returns the number of bytes that the other host has not acknowledged.
int BytesOnTheirWay(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

// The memory for the records that are on their way through this process. A link uses memory only
// while it has a part of a record, because most links of a large job are idle most of the time.
// Only one thread may use the buffers.
class RecordBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  // Returns null if there is no memory.
  Buffer Take() {
    if (spare_.empty()) return Buffer(new (std::nothrow) std::byte[kMargin + kRecordBytes]);
    Buffer buffer = std::move(spare_.back());
    spare_.pop_back();
    return buffer;
  }
  void Return(Buffer buffer) {
    if (spare_.size() < kSpare) spare_.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kSpare = 4;  // enough for two links, as in a ring

  std::vector<Buffer> spare_ = Reserved();

  static std::vector<Buffer> Reserved() {
    std::vector<Buffer> spare;
    spare.reserve(kSpare);  // so that Return cannot fail
    return spare;
  }
};

// A record that is being read or written. It has a buffer only while it is not empty.
class Record {
 public:
  explicit Record(RecordBuffers& buffers) : buffers_(&buffers) {}

  // Returns false if there is no memory.
  bool HaveBuffer() {
    if (!bytes_) bytes_ = buffers_->Take();
    return bytes_ != nullptr;
  }
  void Free() {
    if (bytes_) buffers_->Return(std::move(bytes_));
    begin_ = end_ = 0;
  }
  std::byte* data() const { return bytes_.get() + kMargin; }

  void SetOutgoing(size_t begin, size_t end) {
    begin_ = begin;
    end_ = end;
  }
  bool outgoing() const { return begin_ != end_; }
  uint64_t written() const { return written_; }
  // Writes what the socket accepts now. Returns false if the socket has ended.
  bool Write(int fd, bool* moved) {
    while (outgoing()) {
      auto count = WriteSome(fd, ConstBytes(data() + begin_, end_ - begin_));
      if (!count.ok()) return false;
      if (count.value() == 0) return true;
      begin_ += count.value();
      written_ += count.value();
      *moved = true;
      if (!outgoing()) Free();
    }
    return true;
  }

 private:
  RecordBuffers* buffers_;
  RecordBuffers::Buffer bytes_;
  size_t begin_ = 0;  // of the bytes that still have to be written
  size_t end_ = 0;
  uint64_t written_ = 0;  // bytes of all records so far
};

// One direction: from the plain socket to the link.
class Sealing {
 public:
  Sealing(LinkCipher cipher, RecordBuffers& buffers)
      : cipher_(std::move(cipher)), record_(buffers) {}

  bool ended() const { return ended_ && !record_.outgoing(); }
  bool wants_input() const { return !ended_ && !record_.outgoing(); }
  bool wants_output() const { return record_.outgoing(); }
  uint64_t written() const { return record_.written(); }

  bool Advance(int plain, int link, bool* moved) {
    if (!record_.Write(link, moved)) return false;
    if (!wants_input()) return true;
    if (!record_.HaveBuffer()) return false;
    std::byte* const content = record_.data() + kLengthBytes;
    auto count = ReadSome(plain, Bytes(content, kContentBytes));
    if (!count.ok() || count.value() == 0) record_.Free();
    if (!count.ok()) {
      ended_ = true;
      ::shutdown(link, SHUT_WR);
      return true;
    }
    if (count.value() == 0) return true;
    *moved = true;
    const size_t sealed = count.value() + kCipherTagBytes;
    StoreLittleEndian(static_cast<uint32_t>(count.value()), record_.data());
    record_.SetOutgoing(0, kLengthBytes + sealed);
    if (!cipher_.Seal(ConstBytes(content, count.value()), Bytes(content, sealed)).ok()) {
      return false;
    }
    return record_.Write(link, moved);
  }

 private:
  LinkCipher cipher_;
  Record record_;
  bool ended_ = false;
};

// The other direction: from the link to the plain socket.
class Opening {
 public:
  Opening(LinkCipher cipher, RecordBuffers& buffers)
      : cipher_(std::move(cipher)), record_(buffers) {}

  bool ended() const { return ended_ && !record_.outgoing(); }
  bool wants_input() const { return !ended_ && !record_.outgoing(); }
  bool wants_output() const { return record_.outgoing(); }

  bool Advance(int link, int plain, bool* moved) {
    if (!record_.Write(plain, moved)) return false;
    while (wants_input()) {
      if (!record_.HaveBuffer()) return false;
      const size_t wanted = Wanted();
      if (wanted == 0) return false;
      auto count = ReadSome(link, Bytes(record_.data() + received_, wanted - received_));
      if (!count.ok()) {
        record_.Free();
        ended_ = true;
        ::shutdown(plain, SHUT_WR);
        return true;
      }
      if (count.value() == 0) {
        if (received_ == 0) record_.Free();
        return true;
      }
      *moved = true;
      received_ += count.value();
      if (received_ < wanted || received_ == kLengthBytes) continue;
      const size_t content = wanted - kLengthBytes - kCipherTagBytes;
      received_ = 0;
      std::byte* const sealed = record_.data() + kLengthBytes;
      if (!cipher_.Open(ConstBytes(sealed, content + kCipherTagBytes), Bytes(sealed, content))
               .ok()) {
        return false;
      }
      record_.SetOutgoing(kLengthBytes, kLengthBytes + content);
      if (!record_.Write(plain, moved)) return false;
    }
    return true;
  }

 private:
  // Returns the length of the record as far as it is known, or 0 for an invalid length.
  size_t Wanted() const {
    if (received_ < kLengthBytes) return kLengthBytes;
    const auto content = LoadLittleEndian<uint32_t>(record_.data());
    if (content == 0 || content > kContentBytes) return 0;
    return kLengthBytes + content + kCipherTagBytes;
  }

  LinkCipher cipher_;
  Record record_;
  size_t received_ = 0;
  bool ended_ = false;
};

}  // namespace

class EncryptedLinks::Tunnel {
 public:
  Tunnel(UniqueFd plain, UniqueFd link, LinkCipher seal, LinkCipher open, RecordBuffers& buffers)
      : plain_(std::move(plain)),
        link_(std::move(link)),
        sealing_(std::move(seal), buffers),
        opening_(std::move(open), buffers) {}

  bool done() const { return !link_.valid(); }
  bool all_sent() const { return done() || sealing_.ended(); }

  void AppendPollFds(std::vector<pollfd>& fds) const {
    const auto events = [](bool reads, bool writes) {
      return static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    };
    const short plain = events(sealing_.wants_input(), opening_.wants_output());
    const short link = events(opening_.wants_input(), sealing_.wants_output());
    // poll reports the end of a socket even without requested events. A socket without requested
    // events is skipped, because its end cannot be handled yet.
    fds.push_back({plain != 0 ? plain_.get() : -1, plain, 0});
    fds.push_back({link != 0 ? link_.get() : -1, link, 0});
  }

  // Returns whether data may be in transit to the other host.
  bool sends() const { return !done() && BytesOnTheirWay(link_.get()) > 0; }

  // Returns a number that changes whenever the other host acknowledges data.
  uint64_t progress() const {
    if (done()) return 0;
    return sealing_.written() - static_cast<uint64_t>(BytesOnTheirWay(link_.get()));
  }

  void EndIfHostIsSilent(std::chrono::milliseconds silence) {
    if (done() || !host_.IsSilent(link_.get(), silence)) return;
    plain_.Reset();
    link_.Reset();
  }

  void Advance() {
    bool moved = true;
    for (int turn = 0; turn < kTurns && moved && !done(); ++turn) {
      moved = false;
      const bool good = sealing_.Advance(plain_.get(), link_.get(), &moved) &&
                        opening_.Advance(link_.get(), plain_.get(), &moved);
      if (good && !(sealing_.ended() && opening_.ended())) continue;
      plain_.Reset();
      link_.Reset();
    }
  }

 private:
  static constexpr int kTurns = 8;  // so that a busy link does not starve the others

  UniqueFd plain_;
  UniqueFd link_;
  HostWatch host_;
  Sealing sealing_;
  Opening opening_;
};

class EncryptedLinks::Pump {
 public:
  Pump(std::shared_ptr<CryptoLibrary> crypto, UniqueFd wake, std::chrono::milliseconds silence)
      : library(std::move(crypto)), wake_(std::move(wake)), silence_(silence) {}

  void Run() {
    pthread_setname_np(pthread_self(), "shvd-encrypt");
    sigset_t all;  // the program's own threads handle signals
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::vector<pollfd> fds;
    fds.reserve(2 * tunnels.size() + 1);  // so that no allocation can fail later
    bool quiet = false;                   // no data has moved, and none is in transit
    Deadline next_check = Deadline::After(check_interval_);
    while (!Finished()) {
      fds.clear();
      fds.push_back({leaving_seen_ ? -1 : wake_.get(), POLLIN, 0});
      for (const Tunnel& tunnel : tunnels) tunnel.AppendPollFds(fds);
      const int patience = quiet ? -1 : next_check.RemainingMillis();
      const int timeout =
          leaving_seen_ ? leave_by_.RemainingMillis(kFarewellSliceMillis) : patience;
      quiet = ::poll(fds.data(), fds.size(), timeout) == 0;
      if (next_check.Expired()) {  // also while links are busy or full
        next_check = Deadline::After(check_interval_);
        for (Tunnel& tunnel : tunnels) tunnel.EndIfHostIsSilent(silence_);
      }
      quiet = quiet && std::none_of(tunnels.begin(), tunnels.end(),
                                    [](const Tunnel& each) { return each.sends(); });
      if (!leaving_seen_ && (fds[0].revents & POLLIN) != 0) {
        leaving_seen_ = true;
        leave_at_latest_ = Deadline::After(silence_);
      }
      if (leaving_seen_) WaitWhilePeersRead();
      for (size_t i = 0; i < tunnels.size(); ++i) {
        if (fds[2 * i + 1].revents != 0 || fds[2 * i + 2].revents != 0) tunnels[i].Advance();
      }
    }
  }

  void Leave() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
  }

  const std::shared_ptr<CryptoLibrary> library;
  RecordBuffers buffers;
  std::vector<Tunnel> tunnels;  // changes only before the thread starts

 private:
  // Extends the wait for the peers whenever one of them has read more.
  void WaitWhilePeersRead() {
    uint64_t progress = 0;
    for (const Tunnel& tunnel : tunnels) progress += tunnel.progress();
    if (progress == progress_) return;
    progress_ = progress;
    leave_by_ = Deadline::Earlier(Deadline::After(kFarewellTime), leave_at_latest_);
  }

  bool Finished() const {
    if (!leaving_seen_) return false;
    return leave_by_.Expired() || std::all_of(tunnels.begin(), tunnels.end(),
                                              [](const Tunnel& each) { return each.all_sent(); });
  }

  const UniqueFd wake_;  // an eventfd
  const std::chrono::milliseconds silence_;
  const std::chrono::milliseconds check_interval_ = HostWatch::Interval(silence_);
  bool leaving_seen_ = false;
  std::optional<uint64_t> progress_;  // of all tunnels, once leaving_seen_ is set
  Deadline leave_by_ = Deadline::AfterSeconds(0);
  Deadline leave_at_latest_ = Deadline::AfterSeconds(0);
};

EncryptedLinks::EncryptedLinks() = default;

Result<std::unique_ptr<EncryptedLinks>> EncryptedLinks::Make(std::chrono::milliseconds silence) {
  auto library = CryptoLibrary::Load();
  if (!library.ok()) return library.status();
  UniqueFd wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return IoStatus("eventfd", errno);
  std::unique_ptr<EncryptedLinks> links(new EncryptedLinks());
  links->pump_ = std::make_unique<Pump>(library.value(), std::move(wake), silence);
  return links;
}

EncryptedLinks::~EncryptedLinks() {
  pump_->Leave();
  if (thread_.joinable()) thread_.join();
}

Result<UniqueFd> EncryptedLinks::Add(UniqueFd link, const LinkKeys& keys) {
  std::array<int, 2> pair;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    return IoStatus("make a socket for an encrypted link", errno);
  }
  UniqueFd ours(pair[0]);
  UniqueFd theirs(pair[1]);
  auto seal = LinkCipher::Make(pump_->library, keys.sending, LinkCipher::Use::kSeal);
  if (!seal.ok()) return seal.status();
  auto open = LinkCipher::Make(pump_->library, keys.receiving, LinkCipher::Use::kOpen);
  if (!open.ok()) return open.status();
  pump_->tunnels.emplace_back(std::move(ours), std::move(link), std::move(seal).value(),
                              std::move(open).value(), pump_->buffers);
  return theirs;
}

Status EncryptedLinks::Start() {
  try {
    thread_ = std::thread([pump = pump_.get()] { pump->Run(); });
  } catch (const std::system_error& error) {
    return Status(StatusCode::kIo, std::string("start the encryption's thread: ") + error.what());
  }
  return Status();
}

namespace {

class EncryptedTransport final : public Transport {
 public:
  EncryptedTransport(std::unique_ptr<EncryptedLinks> links, std::unique_ptr<Transport> transport)
      : links_(std::move(links)), transport_(std::move(transport)) {}

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  LinkCosts costs() const override { return transport_->costs(); }
  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    return transport_->PostSend(peer, data);
  }
  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return transport_->PostReceive(peer, data);
  }
  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return transport_->PostReceiveUpTo(peer, data, length);
  }
  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    return transport_->Wait(tickets, deadline);
  }
  void Abort(const Status& why) override { transport_->Abort(why); }

 private:
  const std::unique_ptr<EncryptedLinks> links_;  // ends after the transport
  const std::unique_ptr<Transport> transport_;
};

}  // namespace

std::unique_ptr<Transport> MakeEncryptedTransport(std::unique_ptr<EncryptedLinks> links,
                                                  std::unique_ptr<Transport> transport) {
  return std::make_unique<EncryptedTransport>(std::move(links), std::move(transport));
}

}  // namespace sparkhvd
