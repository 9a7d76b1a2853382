#include "transport/link_maker.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "rendezvous/socket.h"

namespace sparkhvd {
namespace {

constexpr int kKindShift = 32;
// How long the lower rank of a pair waits for the dial of the higher one.
constexpr std::chrono::milliseconds kHeadStart(100);

}  // namespace

std::optional<RankClaim> RankClaimOf(uint64_t claim, int own, int size) {
  const auto kind = static_cast<ConnectionKind>(claim >> kKindShift);
  const uint64_t rank = claim & 0xffffffff;
  if (kind != ConnectionKind::kLink && kind != ConnectionKind::kWatch) return std::nullopt;
  if (rank >= static_cast<uint64_t>(size) || rank == static_cast<uint64_t>(own)) {
    return std::nullopt;
  }
  return RankClaim{kind, static_cast<int>(rank)};
}

bool Contacts::SameHost(int peer) const {
  const AddressRecord& own = Of(rank);
  const AddressRecord& other = Of(peer);
  return !own.unix_name.empty() && !other.unix_name.empty() && own.host_key == other.host_key;
}

std::string Contacts::Purpose(int acceptor) const {
  return "mesh/" + scope + "/" + std::to_string(acceptor);
}

DialOptions Contacts::DialOf(int peer, ConnectionKind kind, bool local) const {
  DialOptions dial;
  dial.token = token;
  dial.purpose = Purpose(peer);
  dial.claim = (static_cast<uint64_t>(kind) << kKindShift) | static_cast<uint64_t>(rank);
  dial.buffer_bytes = buffer_bytes;
  if (local) {
    dial.unix_name = Of(peer).unix_name;
  } else {
    dial.addresses = Of(peer).tcp;
  }
  return dial;
}

PeerSocket Contacts::LinkOver(UniqueFd connection, const LinkKeys& keys) const {
  PeerSocket link{std::move(connection), UniqueFd(), std::nullopt};
  link.process = ProcessBehind(link.stream);
  if (Of(rank).encrypt && !IsUnixSocket(link.stream.get())) link.keys = keys;
  return link;
}

UniqueFd ProcessBehind(const UniqueFd& socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (!IsUnixSocket(socket.get()) ||
      ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0 ||
      peer.pid == ::getpid()) {
    return UniqueFd();
  }
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));  // sets CLOEXEC
}

LinkMaker::LinkMaker(Contacts contacts, Reception reception, OwnedSockets sockets,
                     std::chrono::milliseconds silence)
    : contacts_(std::move(contacts)),
      reception_(std::move(reception)),
      sockets_(std::move(sockets)),
      silence_(silence) {}

void LinkMaker::Begin(int peer) {
  if (dials_.count(peer) != 0) return;
  const bool first = peer < contacts_.rank;
  dials_.emplace(peer, PeerDial{contacts_.SameHost(peer),
                                first ? Deadline::AfterSeconds(0) : Deadline::After(kHeadStart),
                                std::nullopt});
}

void LinkMaker::AppendPollFds(std::vector<pollfd>& fds) {
  for (auto& [peer, dial] : dials_) {
    if (dial.dialing) dial.dialing->AppendPollFds(fds);
  }
  reception_begin_ = fds.size();
  reception_.AppendPollFds(fds);
  reception_end_ = fds.size();
}

int LinkMaker::TimeoutMillis(int cap) {
  const int patience = reception_.TimeoutMillis(cap);
  serve_by_ = Deadline::After(std::chrono::milliseconds(patience));
  int timeout = patience;
  for (auto& [peer, dial] : dials_) {
    timeout =
        dial.dialing ? dial.dialing->TimeoutMillis(timeout) : dial.start.RemainingMillis(timeout);
  }
  return timeout;
}

std::vector<LinkMaker::Outcome> LinkMaker::Advance(const std::vector<pollfd>& fds) {
  std::vector<Outcome> outcomes;
  AdvanceDials(fds, outcomes);
  const bool called = std::any_of(fds.begin() + static_cast<std::ptrdiff_t>(reception_begin_),
                                  fds.begin() + static_cast<std::ptrdiff_t>(reception_end_),
                                  [](const pollfd& entry) { return entry.revents != 0; });
  if (!called && !serve_by_.Expired()) return outcomes;
  const int size = static_cast<int>(contacts_.records.size());
  const auto dials_itself = [&](uint64_t claim) {
    const auto who = RankClaimOf(claim, contacts_.rank, size);
    return who && who->rank < contacts_.rank && dials_.count(who->rank) != 0;
  };
  for (Admitted& admitted : reception_.Serve(dials_itself)) {
    const auto who = RankClaimOf(admitted.claim, contacts_.rank, size);
    if (!who || who->kind != ConnectionKind::kLink) continue;
    dials_.erase(who->rank);
    const LinkKeys keys{admitted.keys.from_acceptor, admitted.keys.from_dialer};
    outcomes.push_back({who->rank, Owned(std::move(admitted.fd), keys)});
  }
  return outcomes;
}

void LinkMaker::AdvanceDials(const std::vector<pollfd>& fds, std::vector<Outcome>& outcomes) {
  for (auto next = dials_.begin(); next != dials_.end();) {
    auto& [peer, dial] = *next;
    auto link = AdvanceDial(peer, dial, fds);
    if (link) outcomes.push_back({peer, std::move(*link)});
    next = link ? dials_.erase(next) : std::next(next);
  }
}

std::optional<Result<PeerSocket>> LinkMaker::AdvanceDial(int peer, PeerDial& dial,
                                                         const std::vector<pollfd>& fds) {
  if (!dial.dialing) {
    if (dial.start.Expired()) dial.dialing = MakeDialing(peer, dial.local);
    return std::nullopt;
  }
  auto dialed = dial.dialing->Advance(fds);
  if (!dialed) return std::nullopt;
  if (dialed->ok()) {
    auto& [connection, keys] = dialed->value();
    return Owned(std::move(connection), {keys.from_dialer, keys.from_acceptor});
  }
  if (!dial.local) return dialed->status();
  // Equal host keys do not guarantee a common network namespace.
  dial.local = false;
  dial.dialing = MakeDialing(peer, dial.local);
  return std::nullopt;
}

// The deadline of the owner's wait ends the dialing.
Dialing LinkMaker::MakeDialing(int peer, bool local) const {
  return Dialing(contacts_.DialOf(peer, ConnectionKind::kLink, local), Deadline::Never());
}

PeerSocket LinkMaker::Owned(UniqueFd connection, const LinkKeys& keys) {
  LimitSilence(connection.get(), silence_);
  sockets_.Add(connection.get());
  return contacts_.LinkOver(std::move(connection), keys);
}

}  // namespace sparkhvd
