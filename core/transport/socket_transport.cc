#include "transport/socket_transport.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/io_status.h"
#include "base/wait.h"
#include "rendezvous/socket.h"
#include "transport/failures.h"
#include "transport/link_stream.h"
#include "transport/message_header.h"
#include "transport/transfer.h"

namespace sparkhvd {
namespace {

// Limits one system call, so that a sending peer does not starve the others.
constexpr size_t kBytesPerCall = size_t{1} << 20;
constexpr int kCallsPerTurn = 8;
// How long a closing transport waits for a peer that reads nothing.
constexpr std::chrono::milliseconds kLingerTime(1000);
constexpr int kLingerSliceMillis = 5;  // poll does not report acknowledgements

// The rest of a transfer: of its header, and of its data.
struct Remaining {
  explicit Remaining(Transfer& transfer) {
    if (transfer.done < kMessageHeaderBytes) {
      header = {transfer.header.data() + transfer.done, kMessageHeaderBytes - transfer.done};
    }
    if (transfer.length != nullptr) return;  // the next bytes may be of the next message
    const size_t offset = transfer.payload_done();
    data = {transfer.data + offset, std::min(transfer.size - offset, kBytesPerCall)};
  }
  Bytes header;
  Bytes data;
};

class Link {
 public:
  Link(int peer, LinkStream stream, UniqueFd process)
      : peer_(peer), stream_(std::move(stream)), process_(std::move(process)) {}

  int peer() const { return peer_; }
  bool connected() const { return stream_.connected(); }
  void Connect(LinkStream stream, UniqueFd process) {
    stream_ = std::move(stream);
    process_ = std::move(process);
  }
  bool pending() const { return !transfers_.empty(); }
  TransferQueues& transfers() { return transfers_; }
  const TransferQueues& transfers() const { return transfers_; }
  const Status& failure() const { return failure_; }

  // Moves all bytes that the socket accepts and offers now. Removes completed tickets from `open`.
  // Returns true if any bytes moved.
  bool Advance(std::unordered_set<Ticket>& open) {
    bool moved = false;
    for (int call = 0; call < kCallsPerTurn && failure_.ok() && connected() && pending(); ++call) {
      const bool sent = AdvanceSend(open);
      const bool received = failure_.ok() && AdvanceReceive(open);
      if (!sent && !received) break;
      moved = true;
    }
    return moved;
  }

  void AppendPollFds(std::vector<pollfd>& fds) const {
    // A peer that has stopped sending is lost, even for a rank that only sends to it.
    short events = POLLRDHUP;
    if (!transfers_.sends.empty()) events |= POLLOUT;
    if (!transfers_.receives.empty()) events |= POLLIN;
    fds.push_back({stream_.fd(), events, 0});
    fds.push_back({process_.get(), POLLIN, 0});
  }

  // Checks whether the peer has ended. Called with poll's events if they moved no bytes.
  void Judge(short stream_events, short process_events) {
    if (!failure_.ok() || !pending()) return;
    if ((stream_events & (POLLRDHUP | POLLHUP | POLLERR)) != 0 && transfers_.receives.empty())
      End(kClosedLinks);
    if (failure_.ok() && (process_events & POLLIN) != 0) End("its process has ended");
  }

  void EndIfHostIsSilent(std::chrono::milliseconds silence) {
    if (failure_.ok() && connected() && pending() && host_.IsSilent(stream_.fd(), silence)) {
      End("its host has stopped responding");
    }
  }

  // The peer cannot be reached, although it listened when the job started.
  void FailToConnect(const Status& why) {
    const bool hung_up = why.code() == StatusCode::kAuthentication;
    failure_ = PeerLost(peer_, hung_up ? kClosedLinks : "it cannot be reached: " + why.message())
                   .Annotate(Front());
  }

  // Sends the reason unless a message is half sent, and ends the connection. Buffers are no longer
  // touched.
  void Close(const Status* why) {
    if (!connected()) return transfers_.Clear();
    const bool between_messages =
        !stream_.is_in_record() && (transfers_.sends.empty() || transfers_.sends.front().done == 0);
    if (why != nullptr && between_messages) {
      // Without memory for the reason, the peer only notices the end.
      static_cast<void>(Guarded([&] { return SendFarewell(*why); }));
    }
    // Ends only this direction. Otherwise the kernel would answer later data of the peer with a
    // reset, which discards data of completed transfers that the peer has not read yet.
    ::shutdown(stream_.fd(), SHUT_WR);
    transfers_.Clear();
  }

  // Discards what the peer has sent, because closing a socket with unread data resets it. Returns
  // the bytes that have not arrived at the peer's host, or 0 if the peer has ended, too.
  int DrainForClose() {
    const int undelivered = connected() ? Undelivered() : 0;
    if (undelivered == 0) return 0;
    const ssize_t count = ::recv(stream_.fd(), nullptr, kBytesPerCall, MSG_TRUNC);  // TCP discards
    const bool open = count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
    return open ? undelivered : 0;
  }

 private:
  // Returns the bytes that the peer's host has not acknowledged. Returns 0 for Unix sockets,
  // because they lose nothing, and if the host does not respond.
  int Undelivered() const {
    int bytes = 0;
    tcp_info info{};
    socklen_t size = sizeof(info);
    const int fd = stream_.fd();
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
    if (info.tcpi_retransmits > 0) return 0;  // for at least 0.2 s
    return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
  }

  // Ends the link if its stream has ended.
  bool HasMoved(const Result<size_t>& count) {
    if (!count.ok()) End(count.status().message());
    return count.ok() && count.value() > 0;
  }

  bool AdvanceSend(std::unordered_set<Ticket>& open) {
    if (transfers_.sends.empty()) return false;
    Transfer& transfer = transfers_.sends.front();
    const Remaining remaining(transfer);
    const auto count = stream_.Write(remaining.header, remaining.data);
    if (!HasMoved(count)) return false;
    transfer.done += count.value();
    if (transfer.done == transfer.total()) {
      open.erase(transfer.ticket);
      transfers_.sends.pop_front();
    }
    return true;
  }

  bool AdvanceReceive(std::unordered_set<Ticket>& open) {
    if (transfers_.receives.empty()) return false;
    Transfer& transfer = transfers_.receives.front();
    const Remaining remaining(transfer);
    const size_t before = transfer.done;
    const auto count = stream_.Read(remaining.header, remaining.data);
    if (!HasMoved(count)) return false;
    transfer.done += count.value();
    if (before < kMessageHeaderBytes && transfer.done >= kMessageHeaderBytes) {
      if (!CheckHeader(transfer)) return false;
    }
    if (transfer.done == transfer.total()) {
      open.erase(transfer.ticket);
      transfers_.receives.pop_front();
    }
    return true;
  }

  bool CheckHeader(Transfer& transfer) {
    auto header = DecodeMessageHeader(ConstBytes(transfer.header.data(), transfer.header.size()));
    if (!header.ok()) {
      failure_ = header.status().Annotate(Front());
    } else if (header.value().farewell) {
      ReadFarewell(header.value(), ConstBytes(transfer.data, transfer.payload_done()));
    } else if (Status wrong = transfer.SetLength(header.value().length, peer_); !wrong.ok()) {
      failure_ = std::move(wrong);
    }
    return failure_.ok();
  }

  // `start` is the data that arrived together with the header.
  void ReadFarewell(const MessageHeader& header, ConstBytes start) {
    std::string text(reinterpret_cast<const char*>(start.data()),
                     std::min<size_t>(start.size(), header.length));
    const size_t missing = header.length - text.size();
    std::array<std::byte, kMaxFarewellBytes> rest;
    auto count = stream_.Read(Bytes(rest.data(), missing));
    if (count.ok()) text.append(reinterpret_cast<const char*>(rest.data()), count.value());
    failure_ = PeerAborted(peer_, Status(header.code, text)).Annotate(Front());
  }

  Status SendFarewell(const Status& why) {
    const std::string text = why.message().substr(0, kMaxFarewellBytes);
    const auto header = EncodeMessageHeader({true, text.size(), why.code()});
    std::string message(reinterpret_cast<const char*>(header.data()), header.size());
    message += text;
    // Drops the bytes that cannot be sent at once. The peer then notices the end without the
    // reason.
    return stream_.Write(AsBytes(message)).status();
  }

  // Ends the link, because the peer has ended. Its farewell may be unread if no receive was posted.
  void End(const std::string& how) {
    const bool between_messages =
        transfers_.receives.empty() || transfers_.receives.front().done == 0;
    std::array<std::byte, kMessageHeaderBytes> bytes;
    if (between_messages) {
      auto count = stream_.Read(Bytes(bytes.data(), bytes.size()));
      if (count.ok() && count.value() == bytes.size()) {
        auto header = DecodeMessageHeader(ConstBytes(bytes.data(), bytes.size()));
        if (header.ok() && header.value().farewell) return ReadFarewell(header.value(), {});
      }
    }
    failure_ = PeerLost(peer_, how).Annotate(Front());
  }

  // Returns the name of the failing transfer.
  std::string Front() const {
    return TransferName(transfers_.receives.empty() ? Direction::kSend : Direction::kReceive,
                        peer_);
  }

  int peer_;
  LinkStream stream_;
  UniqueFd process_;  // a pidfd, as in PeerSocket
  HostWatch host_;
  TransferQueues transfers_;
  Status failure_;
};

class SocketTransport final : public Transport {
 public:
  SocketTransport(int rank, std::vector<Link> links, UniqueFd wake, const LinkCosts& costs,
                  std::chrono::milliseconds silence, std::unique_ptr<LinkMaker> maker,
                  std::shared_ptr<RecordBuffers> buffers)
      : rank_(rank),
        wake_(std::move(wake)),
        costs_(costs),
        silence_(silence),
        buffers_(std::move(buffers)),
        links_(std::move(links)),
        maker_(std::move(maker)) {}

  ~SocketTransport() override {
    maker_.reset();
    for (Link& link : links_) link.Close(nullptr);
    Linger();
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(links_.size()); }
  LinkCosts costs() const override { return costs_; }

  Result<Ticket> PostSend(int peer, ConstBytes data) override {
    return Post(Direction::kSend, peer, const_cast<std::byte*>(data.data()), data.size());
  }

  Result<Ticket> PostReceive(int peer, Bytes data) override {
    return Post(Direction::kReceive, peer, data.data(), data.size());
  }

  Result<Ticket> PostReceiveUpTo(int peer, Bytes data, size_t* length) override {
    return Post(Direction::kReceive, peer, data.data(), data.size(), length);
  }

  Status Wait(Span<const Ticket> tickets, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      LetAbortIn(lock);
      if (broken_) return *broken_;
      const bool moved = AdvanceLinks();
      if (Status failure = FirstFailure(); !failure.ok()) return Break(failure);
      const Ticket* open = FirstOpen(tickets, open_);
      if (open == nullptr) return Status();
      if (deadline.Expired()) return Break(LateTicket(links_, *open));
      if (!moved) SHVD_TRY(AwaitSockets(lock, deadline));
    }
  }

  void Abort(const Status& why) override {
    aborts_waiting_.fetch_add(1);
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
    const std::lock_guard<std::mutex> lock(mutex_);
    aborts_waiting_.fetch_sub(1);
    if (!broken_) {
      (void)Break(why.ok() ? Status(StatusCode::kAborted, "aborted without a reason") : why);
    }
    aborted_.notify_all();
  }

 private:
  Result<Ticket> Post(Direction direction, int peer, std::byte* data, size_t size,
                      size_t* length = nullptr) {
    SHVD_TRY(CheckPeer(peer, rank_, this->size()));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return *broken_;
    Transfer transfer{++last_ticket_, data, size, length, {}};
    const bool sending = direction == Direction::kSend;
    if (sending) transfer.header = EncodeMessageHeader({false, size, StatusCode::kAborted});
    open_.insert(transfer.ticket);
    Link& link = links_[static_cast<size_t>(peer)];
    link.transfers().Post(direction, transfer);
    if (!link.connected() && maker_) maker_->Begin(peer);
    // Sends small messages before the wait. Wait reports any failure of this.
    if (sending) link.Advance(open_);
    return transfer.ticket;
  }

  // Waits for sent data to arrive, as long as some of it arrives in every second. Nearly always, it
  // has arrived long before.
  void Linger() {
    const Deadline latest = Deadline::After(silence_);
    Deadline deadline = latest;
    int64_t before = -1;
    while (!deadline.Expired()) {
      int64_t undelivered = 0;
      for (Link& link : links_) undelivered += link.DrainForClose();
      if (undelivered == 0) return;
      if (undelivered != before) {
        deadline = Deadline::Earlier(Deadline::After(kLingerTime), latest);
      }
      before = undelivered;
      (void)::poll(nullptr, 0, deadline.RemainingMillis(kLingerSliceMillis));
    }
  }

  // A mutex is not fair: while data flows, this thread could lock it repeatedly before an aborting
  // thread gets it.
  void LetAbortIn(std::unique_lock<std::mutex>& lock) {
    while (aborts_waiting_.load() != 0) AwaitNotification(aborted_, lock);
  }

  bool AdvanceLinks() {
    bool moved = false;
    for (Link& link : links_) {
      if (link.pending() && link.Advance(open_)) moved = true;
    }
    return moved;
  }

  Status FirstFailure() const {
    for (const Link& link : links_) SHVD_TRY(link.failure());
    return Status();
  }

  // Sleeps without the mutex until a socket is ready, a peer ends, or Abort is called.
  Status AwaitSockets(std::unique_lock<std::mutex>& lock, Deadline deadline) {
    poll_fds_.clear();
    polled_links_.clear();
    for (Link& link : links_) {
      if (!link.pending()) continue;
      link.AppendPollFds(poll_fds_);
      polled_links_.push_back(&link);
    }
    poll_fds_.push_back({wake_.get(), POLLIN, 0});
    int millis = deadline.RemainingMillis(static_cast<int>(check_interval_.count()));
    if (maker_) {
      maker_->AppendPollFds(poll_fds_);
      millis = maker_->TimeoutMillis(millis);
    }
    polling_ = true;
    lock.unlock();
    const int ready = ::poll(poll_fds_.data(), poll_fds_.size(), millis);
    const int error = errno;
    lock.lock();
    polling_ = false;
    if (broken_) {
      maker_.reset();
      return *broken_;
    }
    if (ready < 0 && error != EINTR) return Break(IoStatus("poll", error));
    if (next_check_.Expired()) {
      next_check_ = Deadline::After(check_interval_);
      for (Link* link : polled_links_) link->EndIfHostIsSilent(silence_);
    }
    if (maker_ && ready >= 0) TakeNewLinks();
    if (ready <= 0) return Status();
    // Handle the data that peers sent before they ended, then their end.
    if (AdvanceLinks()) return Status();
    for (size_t i = 0; i < polled_links_.size(); ++i) {
      polled_links_[i]->Judge(poll_fds_[2 * i].revents, poll_fds_[2 * i + 1].revents);
    }
    return Status();
  }

  void TakeNewLinks() {
    std::vector<LinkMaker::Outcome> outcomes = maker_->Advance(poll_fds_);
    if (outcomes.empty()) return;
    for (LinkMaker::Outcome& outcome : outcomes) {
      Link& link = links_[static_cast<size_t>(outcome.peer)];
      if (link.connected()) continue;
      if (!outcome.link.ok()) {
        link.FailToConnect(outcome.link.status());
        continue;
      }
      PeerSocket peer = std::move(outcome.link).value();
      auto stream = LinkStream::Make(std::move(peer.stream), peer.keys, buffers_);
      if (stream.ok()) {
        link.Connect(std::move(stream).value(), std::move(peer.process));
      } else {
        link.FailToConnect(stream.status());
      }
    }
    const auto connected = std::count_if(links_.begin(), links_.end(),
                                         [](const Link& link) { return link.connected(); });
    if (connected + 1 == size()) maker_.reset();
  }

  Status Break(const Status& why) {
    broken_ = why;
    // Peers that dial later notice at once. A thread that polls the listeners closes them itself.
    if (!polling_) maker_.reset();
    for (Link& link : links_) link.Close(&why);
    open_.clear();
    return why;
  }

  const int rank_;
  const UniqueFd
      wake_;  // an eventfd that Abort writes and no thread reads: the transport has ended then
  const LinkCosts costs_;
  const std::chrono::milliseconds silence_;
  const std::shared_ptr<RecordBuffers> buffers_;  // of all links
  const std::chrono::milliseconds check_interval_ = HostWatch::Interval(silence_);
  std::atomic<int> aborts_waiting_{0};
  std::condition_variable aborted_;
  std::mutex mutex_;  // guards all fields below; released while waiting for sockets
  std::vector<Link> links_;
  std::unordered_set<Ticket> open_;
  Ticket last_ticket_ = 0;
  std::optional<Status> broken_;
  std::vector<pollfd> poll_fds_;
  std::vector<Link*> polled_links_;
  std::unique_ptr<LinkMaker> maker_;  // null once all links exist, and in a broken transport
  bool polling_ = false;
  Deadline next_check_ = Deadline::After(check_interval_);
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeSocketTransport(int rank, std::vector<PeerSocket> peers,
                                                       const LinkCosts& costs,
                                                       std::chrono::milliseconds silence,
                                                       std::unique_ptr<LinkMaker> maker) {
  UniqueFd wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return IoStatus("eventfd", errno);
  const auto buffers = std::make_shared<RecordBuffers>();
  std::vector<Link> links;
  for (PeerSocket& peer : peers) {
    auto stream = LinkStream::Make(std::move(peer.stream), peer.keys, buffers);
    if (!stream.ok()) return stream.status();
    const auto number = static_cast<int>(links.size());
    links.emplace_back(number, std::move(stream).value(), std::move(peer.process));
  }
  return std::unique_ptr<Transport>(std::make_unique<SocketTransport>(
      rank, std::move(links), std::move(wake), costs, silence, std::move(maker), buffers));
}

}  // namespace sparkhvd
