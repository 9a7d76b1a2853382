// Connects the ranks. Every rank listens, publishes its addresses, and dials the lower ranks to
// which it needs a connection from the start, a few at a time, while it accepts connections from
// higher ranks.
#include "transport/mesh.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <list>
#include <optional>
#include <utility>

#include "base/io_status.h"
#include "base/random.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "rendezvous/dial.h"
#include "rendezvous/reception.h"
#include "rendezvous/socket.h"
#include "transport/address_record.h"
#include "transport/arena_file.h"
#include "transport/failures.h"
#include "transport/link_maker.h"
#include "transport/meeting.h"
#include "transport/memory_groups.h"
#include "transport/memory_links.h"
#include "transport/shared_arena.h"
#include "transport/socket_transport.h"

namespace sparkhvd {
namespace {

using Kind = ConnectionKind;
// The keys that each rank publishes: its addresses, whether it has mapped the shared memory, and
// the peers that it could not reach.
constexpr char kAddress[] = "address";
constexpr char kSettings[] = "settings";
constexpr char kArena[] = "arena";
constexpr char kUnreachable[] = "unreachable";
constexpr char kYes[] = "yes";
constexpr int kSliceMillis = 100;  // interval of the checks of other ranks
// Enough dials to hide the round trips of a handshake, and few enough for the acceptors.
constexpr size_t kDialsAtOnce = 16;
constexpr size_t kMaxArenaRegionBytes = size_t{1} << 40;

std::string RankName(int rank) { return "rank " + std::to_string(rank); }

// Returns a name that is unpredictable and unique to the job.
Result<std::string> FreshUnixName() {
  std::array<std::byte, 16> bytes;
  SHVD_TRY(FillRandom(Bytes(bytes.data(), bytes.size())));
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "sparkhvd-";
  for (const std::byte value : bytes) {
    name += kDigits[std::to_integer<size_t>(value >> 4)];
    name += kDigits[std::to_integer<size_t>(value & std::byte{15})];
  }
  return name;
}

Status CheckOptions(const MeshOptions& options) {
  const auto invalid = [](const std::string& text) {
    return Status(StatusCode::kInvalidArgument, text);
  };
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return invalid("rank " + std::to_string(options.rank) + " is out of range for a job of size " +
                   std::to_string(options.size));
  }
  if (options.size == 1) return Status();
  // The limit also keeps the arena's size, a sum over all members, from overflowing.
  if (options.arena_region_bytes == 0 || options.arena_region_bytes > kMaxArenaRegionBytes) {
    return invalid("an arena region must have 1 to " + std::to_string(kMaxArenaRegionBytes) +
                   " bytes, not " + std::to_string(options.arena_region_bytes));
  }
  if (options.token.empty()) return invalid("ranks can only be connected with the job's token");
  if (options.neighbors && options.neighbors->count() != static_cast<size_t>(options.size)) {
    return invalid("neighbors need a watch of each rank");
  }
  if (options.bind_hosts.empty()) return invalid("a rank needs an address for its peers to dial");
  for (const std::string& host : options.bind_hosts) {
    if (!host.empty() && host != "0.0.0.0" && host != "::") continue;
    return invalid("bind_host '" + host +
                   "' is not an address that peers can dial; use the address of one interface");
  }
  return Status();
}

class MeshBuilder {
 public:
  MeshBuilder(const MeshOptions& options, KeyValueStore& rendezvous, Deadline deadline)
      : options_(options),
        meeting_(rendezvous, options.scope, options.rank, deadline, options.interrupted),
        deadline_(deadline),
        contacts_{options.rank, options.token, options.scope, options.socket_buffer_bytes,
                  std::vector<AddressRecord>(static_cast<size_t>(options.size))},
        links_(static_cast<size_t>(options.size)),
        watches_(static_cast<size_t>(options.size)) {}

  // Returns an empty mesh if the ranks are neighbors and could not share the memory of the links.
  Result<Mesh> Build() {
    if (options_.size == 1) return Connect();
    SHVD_TRY(meeting_.Join());
    Mesh mesh;
    const Status connected = Guarded([&] {
      auto made = Connect();
      SHVD_TRY(made.status());
      mesh = std::move(made).value();
      return Status();
    });
    if (!connected.ok()) {
      ReportUnreachable();
      return meeting_.Fail(connected);
    }
    meeting_.Leave();
    return mesh;
  }

 private:
  template <typename T>
  static T& At(std::vector<T>& items, int rank) {
    return items[static_cast<size_t>(rank)];
  }

  NumberRange AllRanks() const { return {0, static_cast<uint32_t>(options_.size)}; }

  static std::string Key(const char* what, int rank) {
    return std::string(what) + "/" + std::to_string(rank);
  }

  Result<Mesh> Connect() {
    DescribeSelf();
    if (options_.neighbors) {
      SHVD_TRY(ExchangeRecords());
    } else if (options_.size > 1) {
      SHVD_TRY(Listen());
      SHVD_TRY(ExchangeRecords());
      SHVD_TRY(ConnectLinks());
    }
    Mesh mesh;
    mesh.host_ranks = HostRanks();
    mesh.sockets = sockets_;
    for (const PeerSocket& link : links_) {
      LimitSilence(link.stream.get(), options_.host_timeout);
      mesh.sockets.Add(link.stream.get());
    }
    for (const MemberWatch& watch : watches_) mesh.sockets.Add(watch.socket.get());
    SHVD_TRY(ShareArena(&mesh));
    if (options_.neighbors) return mesh;
    auto transport = MakeSocketTransport(options_.rank, std::move(links_), options_.link_costs,
                                         options_.host_timeout, MakeLinkMaker(mesh.sockets));
    if (!transport.ok()) return transport.status().Annotate(RankName(options_.rank));
    mesh.transport = std::move(transport).value();
    return mesh;
  }

  // Returns null if all links exist.
  std::unique_ptr<LinkMaker> MakeLinkMaker(const OwnedSockets& sockets) {
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer == options_.rank || At(links_, peer).stream.valid()) continue;
      return std::make_unique<LinkMaker>(std::move(contacts_), std::move(*reception_), sockets,
                                         options_.host_timeout);
    }
    return nullptr;
  }

  void DescribeSelf() {
    AddressRecord& own = At(contacts_.records, options_.rank);
    own.host_key = options_.host_key;
    own.shared_memory = options_.neighbors != nullptr;
    own.encrypt = options_.encrypt;
    own.arena_region_bytes = options_.arena_region_bytes;
    own.settings_digest = DigestOf(options_.common_settings);
  }

  Status Listen() {
    AddressRecord& own = At(contacts_.records, options_.rank);
    std::vector<UniqueFd> listeners;
    for (const std::string& host : options_.bind_hosts) {
      auto tcp = ListenTcp({host, 0}, options_.socket_buffer_bytes);
      if (!tcp.ok()) return tcp.status().Annotate(RankName(options_.rank));
      auto address = LocalAddress(tcp.value().get());
      if (!address.ok()) return address.status().Annotate(RankName(options_.rank));
      own.tcp.push_back(address.value());
      listeners.push_back(std::move(tcp).value());
    }
    if (!options_.host_key.empty()) {
      auto name = FreshUnixName();
      if (!name.ok()) return name.status();
      auto local = ListenUnix(name.value(), options_.socket_buffer_bytes);
      // Without Unix sockets, TCP also serves peers on this host.
      if (local.ok()) {
        own.unix_name = name.value();
        own.shared_memory = options_.shared_memory;
        listeners.push_back(std::move(local).value());
      }
    }
    for (const UniqueFd& listener : listeners) sockets_.Add(listener.get());
    reception_.emplace(std::move(listeners), options_.token, contacts_.Purpose(options_.rank));
    return Status();
  }

  Status ExchangeRecords() {
    SHVD_TRY(meeting_.Set(Key(kAddress, options_.rank),
                          EncodeAddressRecord(At(contacts_.records, options_.rank))));
    auto bytes = meeting_.GetAll(kAddress, AllRanks());
    if (!bytes.ok()) return bytes.status();
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer == options_.rank) continue;
      auto record = DecodeAddressRecord(At(bytes.value(), peer));
      if (!record.ok()) return record.status().Annotate("the address of " + RankName(peer));
      At(contacts_.records, peer) = std::move(record).value();
      SHVD_TRY(CheckAgreement(peer));
    }
    return Status();
  }

  Status CheckAgreement(int peer) {
    const AddressRecord& other = At(contacts_.records, peer);
    if (other.encrypt != options_.encrypt) {
      return Disagreement("encryption", options_.encrypt ? "it on" : "it off", peer,
                          other.encrypt ? "it on" : "it off");
    }
    if (other.settings_digest == At(contacts_.records, options_.rank).settings_digest)
      return Status();
    return DifferentSetting(peer);
  }

  // Returns the first setting that differs. The peer publishes its settings, too, as it also finds
  // a rank with other settings; in a record, they would be as many bytes for each pair of ranks.
  Status DifferentSetting(int peer) {
    SHVD_TRY(meeting_.Set(Key(kSettings, options_.rank), EncodeSettings(options_.common_settings)));
    const auto first = static_cast<uint32_t>(peer);
    auto bytes = meeting_.GetAll(kSettings, {first, first + 1});
    if (!bytes.ok()) return bytes.status();
    auto settings = DecodeSettings(bytes.value().front());
    if (!settings.ok()) return settings.status().Annotate("the settings of " + RankName(peer));
    const CommonSettings& own = options_.common_settings;
    const CommonSettings& others = settings.value();
    CommonSettings names = own;
    names.insert(others.begin(), others.end());
    for (const auto& [name, _] : names) {
      if (ValueOf(own, name) != ValueOf(others, name)) {
        return Disagreement(name, ValueOf(own, name), peer, ValueOf(others, name));
      }
    }
    return Status(StatusCode::kInternal, "the digest of the settings of " + RankName(peer) +
                                             " does not belong to its settings");
  }

  static std::string ValueOf(const CommonSettings& settings, const std::string& name) {
    const auto found = settings.find(name);
    return found == settings.end() ? "unknown" : found->second;
  }

  Status Disagreement(const std::string& what, const std::string& own, int peer,
                      const std::string& others) const {
    return Status(StatusCode::kMismatch, "ranks disagree about " + what + ": " +
                                             RankName(options_.rank) + " has " + own + ", " +
                                             RankName(peer) + " has " + others);
  }

  // Returns whether the link to this rank is made at the start. A ring of links shows that each
  // rank can be reached. An elastic job has to find all pairs that cannot reach each other.
  bool NeedsLink(int peer) const {
    if (options_.answer_limit) return true;
    const int distance = std::abs(peer - options_.rank);
    return distance == 1 || distance == options_.size - 1;
  }

  // The connections to a lower rank are dialed one after the other: on the same host a watch and
  // then a link over Unix sockets, otherwise a link over TCP.
  struct PeerDial {
    int peer;
    bool local;
    Kind kind;
    UniqueFd watch;
    Dialing dialing;
    Deadline report_at;  // when the peer counts as unreachable
  };

  // Starts with the nearest rank, so that the dials of all ranks spread over all acceptors.
  Status ConnectLinks() {
    int next = options_.rank - 1;
    std::vector<pollfd> fds;
    while (true) {
      for (; next >= 0 && BusyDials() < kDialsAtOnce; --next) {
        if (contacts_.SameHost(next) || NeedsLink(next)) dials_.push_back(BeginDial(next));
      }
      for (Admitted& admitted : reception_->Serve()) Admit(std::move(admitted));
      if (!unreachable_.empty()) {
        // A dial may fail at once. The other ranks need the time to find out whom they cannot
        // reach.
        if (report_at_.Expired()) return unreachable_failure_;
      } else if (dials_.empty()) {
        const std::vector<int> missing = Missing();
        if (missing.empty()) return Status();
        if (deadline_.Expired()) {
          return Status(StatusCode::kTimeout, RankName(options_.rank) + " at " + OwnAddresses() +
                                                  " was not reached by " + RankNames(missing) +
                                                  " before the deadline");
        }
      }
      fds.clear();
      int timeout = reception_->TimeoutMillis(deadline_.RemainingMillis(kSliceMillis));
      for (PeerDial& dial : dials_) {
        dial.dialing.AppendPollFds(fds);
        timeout = dial.dialing.TimeoutMillis(timeout);
      }
      reception_->AppendPollFds(fds);
      const int ready = ::poll(fds.data(), fds.size(), timeout);
      if (ready < 0 && errno != EINTR) return IoStatus("poll", errno);
      if (ready <= 0) SHVD_TRY(meeting_.Check());
      for (auto dial = dials_.begin(); dial != dials_.end();) {
        auto done = AdvanceDial(*dial, fds);
        SHVD_TRY(done.status());
        dial = done.value() ? dials_.erase(dial) : std::next(dial);
      }
    }
  }

  // If unreachable peers are to be reported, those that have not answered within a slice do not
  // hold up the dials of others. Otherwise only the nearest of them would be reported.
  size_t BusyDials() const {
    if (!options_.answer_limit) return dials_.size();
    const auto fresh = *options_.answer_limit - std::chrono::milliseconds(kSliceMillis);
    const auto busy = std::count_if(dials_.begin(), dials_.end(), [fresh](const PeerDial& dial) {
      return dial.dialing.answered() || dial.report_at.Remaining() > fresh;
    });
    return static_cast<size_t>(busy);
  }

  PeerDial BeginDial(int peer) {
    const bool local = contacts_.SameHost(peer);
    const Kind kind = local ? Kind::kWatch : Kind::kLink;
    const auto limit = options_.answer_limit.value_or(std::chrono::milliseconds(0));
    return {peer, local, kind, UniqueFd(), MakeDialing(peer, kind, local), Deadline::After(limit)};
  }

  Dialing MakeDialing(int peer, Kind kind, bool local) {
    DialOptions dial = contacts_.DialOf(peer, kind, local);
    dial.answer_limit = options_.answer_limit;
    return Dialing(std::move(dial), deadline_);
  }

  // Returns whether all connections to the rank are made, or the rank is noted as unreachable.
  Result<bool> AdvanceDial(PeerDial& dial, const std::vector<pollfd>& fds) {
    auto dialed = dial.dialing.Advance(fds);
    if (!dialed) return false;
    if (!dialed->ok() && dial.local) {
      // Equal host keys do not guarantee a common network namespace. Dialing over TCP reveals any
      // other problem.
      dial.local = false;
      dial.kind = Kind::kLink;
      dial.dialing = MakeDialing(dial.peer, dial.kind, dial.local);
      return false;
    }
    if (!dialed->ok()) {
      const Status failure =
          dialed->status().Annotate(RankName(options_.rank) + " at " + OwnAddresses() +
                                    " could not reach " + RankName(dial.peer));
      if (!options_.answer_limit || dial.dialing.answered()) return failure;
      if (unreachable_.empty()) {
        unreachable_failure_ = failure;
        report_at_ = Deadline::Earlier(dial.report_at, deadline_);
      }
      unreachable_.push_back({dial.peer, dial.report_at});
      return true;
    }
    auto& [connection, keys] = dialed->value();
    if (dial.kind == Kind::kWatch && !NeedsLink(dial.peer)) {
      KeepWatch(dial.peer, std::move(connection));
      return true;
    }
    if (dial.kind == Kind::kWatch) {
      dial.watch = std::move(connection);
      dial.kind = Kind::kLink;
      dial.dialing = MakeDialing(dial.peer, dial.kind, dial.local);
      return false;
    }
    if (dial.local) KeepWatch(dial.peer, std::move(dial.watch));
    KeepLink(dial.peer, std::move(connection), {keys.from_dialer, keys.from_acceptor});
    return true;
  }

  // Another rank may have failed first, so this rank also reports dials that are nearly as old as
  // the limit. Younger dials prove nothing: they may still succeed, and a peer that has just failed
  // for another reason refuses connections.
  void ReportUnreachable() {
    if (!options_.answer_limit) return;
    for (const PeerDial& dial : dials_) {
      if (!dial.dialing.answered()) unreachable_.push_back({dial.peer, dial.report_at});
    }
    std::string peers;
    for (const auto& [peer, report_at] : unreachable_) {
      if (report_at.Remaining() > *options_.answer_limit / 2) continue;
      peers += (peers.empty() ? "" : ",") + std::to_string(peer);
    }
    if (!peers.empty()) meeting_.Report(Key(kUnreachable, options_.rank), peers);
  }

  std::string OwnAddresses() {
    std::string text;
    for (const HostPort& address : At(contacts_.records, options_.rank).tcp) {
      text += (text.empty() ? "" : ", ") + ToText(address);
    }
    return text;
  }

  void KeepWatch(int peer, UniqueFd fd) {
    UniqueFd process = ProcessBehind(fd);
    At(watches_, peer) = MemberWatch{std::move(fd), std::move(process)};
  }

  void KeepLink(int peer, UniqueFd fd, const LinkKeys& keys) {
    At(links_, peer) = contacts_.LinkOver(std::move(fd), keys);
  }

  // The dialer knows the token, but its claim must be valid, too. Otherwise its connection ends
  // here. A rank that is connected already may dial a link that it uses for the first time.
  void Admit(Admitted admitted) {
    const auto claim = RankClaimOf(admitted.claim, options_.rank, options_.size);
    if (!claim) return;
    const auto [kind, peer] = *claim;
    if (kind == Kind::kLink) {
      // A peer that connects again has abandoned its first connection.
      KeepLink(peer, std::move(admitted.fd),
               {admitted.keys.from_acceptor, admitted.keys.from_dialer});
    } else if (kind == Kind::kWatch && IsUnixSocket(admitted.fd.get())) {
      KeepWatch(peer, std::move(admitted.fd));
    }
  }

  // Returns the higher ranks whose dials are missing. A rank that cannot dial a watch dials a link.
  std::vector<int> Missing() {
    std::vector<int> missing;
    for (int peer = options_.rank + 1; peer < options_.size; ++peer) {
      if (At(links_, peer).stream.valid()) continue;
      const bool unwatched = contacts_.SameHost(peer) && !At(watches_, peer).socket.valid();
      if (NeedsLink(peer) || unwatched) missing.push_back(peer);
    }
    return missing;
  }

  std::vector<int> HostRanks() {
    const std::string& own = At(contacts_.records, options_.rank).host_key;
    std::vector<int> ranks;
    for (int rank = 0; rank < options_.size; ++rank) {
      const bool neighbor = !own.empty() && At(contacts_.records, rank).host_key == own;
      if (rank == options_.rank || neighbor) ranks.push_back(rank);
    }
    return ranks;
  }

  Status ShareArena(Mesh* mesh) {
    const std::vector<std::vector<int>> groups = MemoryGroups(contacts_.records);
    if (options_.neighbors && groups.size() != 1) return Status();
    std::shared_ptr<SharedMapping> mapping;
    std::vector<std::string> votes(static_cast<size_t>(options_.size), kYes);
    if (groups.size() < static_cast<size_t>(options_.size)) {
      std::string vote = kYes;
      for (const std::vector<int>& ranks : groups) {
        if (ranks.size() == 1 || !Contains(ranks, options_.rank)) continue;
        auto made = ranks.front() == options_.rank ? CreateArena(ranks) : ReceiveArena(ranks);
        if (made.ok()) {
          mapping = std::move(made).value();
        } else {
          vote = made.status().message();
        }
      }
      SHVD_TRY(meeting_.Set(Key(kArena, options_.rank), vote));
      // All ranks receive the votes of all hosts, because the algorithm between hosts depends on
      // the arenas inside them.
      auto answers = meeting_.GetAll(kArena, AllRanks());
      if (!answers.ok()) return answers.status();
      votes = std::move(answers).value();
    }
    for (const std::vector<int>& ranks : groups) {
      const bool unanimous = std::all_of(ranks.begin(), ranks.end(),
                                         [&](int rank) { return At(votes, rank) == kYes; });
      if (!unanimous) {
        for (const int rank : ranks) mesh->memory_groups.push_back({rank});
        continue;
      }
      mesh->memory_groups.push_back(ranks);
      if (ranks.size() > 1 && Contains(ranks, options_.rank)) JoinArena(mesh, ranks, mapping);
    }
    std::sort(mesh->memory_groups.begin(), mesh->memory_groups.end());
    return Status();
  }

  static bool Contains(const std::vector<int>& ranks, int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }

  // The memory of the ranks of one host: two arenas, and the links of neighbors.
  size_t SharedBytes(size_t count) const {
    return ArenaPair::Bytes(count, options_.arena_region_bytes) + LinkBytes(count);
  }
  size_t LinkBytes(size_t count) const { return options_.neighbors ? MemoryLinksBytes(count) : 0; }

  ArenaPair ArenasIn(const std::shared_ptr<SharedMapping>& mapping, size_t count) const {
    const size_t bytes = ArenaPair::Bytes(count, options_.arena_region_bytes);
    return ArenaPair(SharedMapping::Part(mapping, 0, bytes), count, options_.arena_region_bytes);
  }
  std::shared_ptr<SharedMapping> LinksIn(const std::shared_ptr<SharedMapping>& mapping,
                                         size_t count) const {
    const size_t begin = ArenaPair::Bytes(count, options_.arena_region_bytes);
    return SharedMapping::Part(mapping, begin, LinkBytes(count));
  }

  void JoinArena(Mesh* mesh, const std::vector<int>& ranks,
                 const std::shared_ptr<SharedMapping>& mapping) {
    std::shared_ptr<const MemberWatches> watches = options_.neighbors;
    if (!watches) {
      std::vector<MemberWatch> own;
      for (const int rank : ranks) own.push_back(std::move(At(watches_, rank)));
      watches = std::make_shared<const MemberWatches>(std::move(own));
    }
    const auto found = std::find(ranks.begin(), ranks.end(), options_.rank);
    const auto member = static_cast<int>(found - ranks.begin());
    const ArenaPair pair = ArenasIn(mapping, ranks.size());
    mesh->arena = pair.Join(member, ranks, watches);
    mesh->direct_arena = pair.JoinDirect(member, ranks, watches);
    mesh->watches = watches;
    if (!options_.neighbors) return;
    mesh->transport = MakeMemoryTransport(LinksIn(mapping, ranks.size()), options_.rank,
                                          options_.size, watches, options_.link_costs);
  }

  // Returns the socket to a rank of this host, which carries the file of the shared memory.
  int WatchSocket(int rank) {
    return options_.neighbors ? options_.neighbors->socket(rank) : At(watches_, rank).socket.get();
  }

  // Distinguishes the memory of this mesh from others that the same sockets have carried.
  uint64_t MemoryTag() const {
    Sha256 hash;
    hash.Update(AsBytes(options_.scope));
    return LoadLittleEndian<uint64_t>(hash.Finish().data());
  }

  Result<std::shared_ptr<SharedMapping>> CreateArena(const std::vector<int>& ranks) {
    const size_t bytes = SharedBytes(ranks.size());
    auto file = CreateArenaFile(bytes);
    auto mapping = file.ok() ? SharedMapping::OfFile(file.value().get(), bytes)
                             : Result<std::shared_ptr<SharedMapping>>(file.status());
    if (mapping.ok()) {
      ArenasIn(mapping.value(), ranks.size()).Format();
      if (options_.neighbors) {
        FormatMemoryLinks(*LinksIn(mapping.value(), ranks.size()), ranks.size());
      }
    }
    Status sent;
    for (const int rank : ranks) {
      if (rank == options_.rank) continue;
      const int socket = WatchSocket(rank);
      const Status status = socket < 0
                                ? NoWatch(rank)
                                : SendArenaFile(socket, mapping.ok() ? file.value().get() : -1,
                                                MemoryTag(), deadline_);
      if (sent.ok()) sent = status;
    }
    if (!sent.ok()) return sent;
    return mapping;
  }

  Result<std::shared_ptr<SharedMapping>> ReceiveArena(const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      if (rank != options_.rank && WatchSocket(rank) < 0) return NoWatch(rank);
    }
    const size_t bytes = SharedBytes(ranks.size());
    auto file = ReceiveFile(WatchSocket(ranks.front()), bytes);
    if (!file.ok()) return file.status();
    auto mapping = SharedMapping::OfFile(file.value().get(), bytes);
    if (!mapping.ok()) return mapping;
    SHVD_TRY(ArenasIn(mapping.value(), ranks.size()).Check());
    if (options_.neighbors) {
      SHVD_TRY(CheckMemoryLinks(*LinksIn(mapping.value(), ranks.size()), ranks.size()));
    }
    return mapping;
  }

  // The sockets of another mesh stay open when the creator fails to connect this one.
  Result<UniqueFd> ReceiveFile(int socket, size_t bytes) {
    while (true) {
      const auto slice = Deadline::After(std::chrono::milliseconds(kSliceMillis));
      auto file = ReceiveArenaFile(socket, bytes, MemoryTag(), Deadline::Earlier(slice, deadline_));
      const bool late = !file.ok() && file.status().code() == StatusCode::kTimeout;
      if (!late || deadline_.Expired()) return file;
      SHVD_TRY(meeting_.Check());
    }
  }

  Status NoWatch(int rank) const {
    return Status(StatusCode::kIo, RankName(options_.rank) + " and " + RankName(rank) +
                                       " have no Unix socket between them");
  }

  const MeshOptions& options_;
  Meeting meeting_;
  const Deadline deadline_;
  std::optional<Reception> reception_;
  Contacts contacts_;
  OwnedSockets sockets_;
  std::vector<PeerSocket> links_;
  std::vector<MemberWatch> watches_;
  std::list<PeerDial> dials_;  // underway
  // Lower ranks whose dials have failed, and when they count as unreachable.
  std::vector<std::pair<int, Deadline>> unreachable_;
  Status unreachable_failure_;  // that of the first
  Deadline report_at_ = Deadline::Never();
};

}  // namespace

Result<Mesh> ConnectMesh(const MeshOptions& options, KeyValueStore& rendezvous, Deadline deadline) {
  SHVD_TRY(CheckOptions(options).Annotate("connect the ranks"));
  auto mesh = MeshBuilder(options, rendezvous, deadline).Build();
  if (!mesh.ok() || mesh.value().transport) return mesh;
  MeshOptions over_sockets = options;
  over_sockets.neighbors.reset();
  over_sockets.scope += "/sockets";
  return MeshBuilder(over_sockets, rendezvous, deadline).Build();
}

}  // namespace sparkhvd
