// Runs the real negotiation and collectives of many ranks in virtual time, for `python -m
// bench.simulate`. Reads a line per case from standard input and writes a line with its results:
//
//   negotiate HOSTS RANKS_PER_HOST FAN_IN COSTS    -> seconds of a cycle, messages and bytes that
//                                                     rank 0 sends, most messages of another rank
//   allreduce HOSTS LANES BYTES ALGORITHM SLOWNESS COSTS -> seconds, messages and bytes that a rank
//                                                           sends
//   parts HOSTS LANES BYTES                        -> the number of parts of an allreduce
//   reducescatter HOSTS BYTES ALGORITHM COSTS      -> as allreduce
//   broadcast HOSTS BYTES ROUTE COSTS              -> the same
//   alltoall HOSTS RANKS_PER_HOST BYTES ALGORITHM COSTS -> the same
//   adasum HOSTS RANKS_PER_HOST BYTES COSTS        -> the same
//   start HOSTS RANKS_PER_HOST COSTS               -> seconds, messages of a rank and of the
//                                                     server, and bytes that the server sends
//   stragglers HOSTS MEAN COSTS                    -> seconds of a step beyond MEAN
//
// COSTS are the numbers of NetworkCosts. BYTES is the size of the whole array. Each lane carries
// its share of the bytes over its share of the link, so the program simulates one lane. ALGORITHM
// is ring, halving, doubling, direct, Bruck or ours, the core's own choice. ROUTE is tree or ours.
// The link of the last host is slower by SLOWNESS. The BYTES of an alltoall are those from one rank
// to another. Adasum sums one tensor. A step with stragglers is an allreduce of 4 KiB, before which
// every rank computes for a random time with an exponential distribution.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "collectives/adasum.h"
#include "collectives/allreduce_links.h"
#include "collectives/alltoall.h"
#include "collectives/broadcast.h"
#include "collectives/reducescatter.h"
#include "collectives/select.h"
#include "collectives/slices.h"
#include "scheduler/negotiation.h"
#include "simulation/virtual_network.h"
#include "simulation/virtual_store.h"
#include "transport/address_record.h"
#include "transport/meeting.h"

namespace sparkhvd {
namespace {

constexpr double kPatience = 600;  // seconds of real time

std::istream& operator>>(std::istream& in, NetworkCosts& costs) {
  return in >> costs.latency >> costs.latency_in_host >> costs.per_message >> costs.per_byte >>
         costs.per_byte_in_host;
}

void Require(const Status& status) {
  if (status.ok()) return;
  std::cerr << status.message() << "\n";
  std::exit(1);
}

// Measures cycles in which all ranks submit one operation that is in the response cache.
void Negotiate() {
  constexpr int kFree = 2;
  constexpr int kCycles = 4;
  int hosts = 0, per_host = 0, fan_in = 0;
  NetworkCosts costs;
  std::cin >> hosts >> per_host >> fan_in >> costs;
  const int size = hosts * per_host;
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / per_host);
  VirtualNetwork network(host_of, costs);
  std::vector<VirtualRank> begun(static_cast<size_t>(size));
  network.OnEveryRank([&](Transport& transport) {
    const auto negotiation = MakeCoordinatedNegotiation(transport, 1024, kPatience, fan_in);
    Request request;
    request.name = "gradient";
    request.shape = {1};
    for (int cycle = 0; cycle < kFree + kCycles; ++cycle) {
      if (cycle == kFree) {
        begun[static_cast<size_t>(transport.rank())] = network.rank(transport.rank());
      }
      negotiation->Announce(negotiation->Report({&request}));
      Require(negotiation->Enter());
      const auto outcome = negotiation->Conclude(Deadline::AfterSeconds(kPatience));
      Require(outcome.status());
      for (const Agreement& agreement : outcome.value().response.agreements) {
        negotiation->Remember(request, agreement.rows);
      }
    }
  });
  double seconds = 0;
  size_t most = 0;
  for (int rank = 0; rank < size; ++rank) {
    const VirtualRank& before = begun[static_cast<size_t>(rank)];
    seconds = std::max(seconds, network.rank(rank).now - before.now);
    if (rank > 0) most = std::max(most, network.rank(rank).messages - before.messages);
  }
  std::printf("%.9g %zu %zu %zu\n", seconds / kCycles,
              (network.rank(0).messages - begun[0].messages) / kCycles,
              (network.rank(0).bytes - begun[0].bytes) / kCycles, most / kCycles);
}

auto Algorithm(const std::string& name, int ranks, int lanes, double bytes) {
  LinkCosts costs;
  costs.per_byte *= lanes;
  LinkAlgorithm chosen = SelectForLinks(ranks, static_cast<size_t>(bytes), costs);
  if (name == "ring") chosen = LinkAlgorithm::kRing;
  if (name == "halving") chosen = LinkAlgorithm::kHalving;
  if (name == "doubling") chosen = LinkAlgorithm::kDoubling;
  return chosen == LinkAlgorithm::kRing      ? AllreduceRingInPlace
         : chosen == LinkAlgorithm::kHalving ? AllreduceHalvingInPlace
                                             : AllreduceDoublingInPlace;
}

void Parts() {
  int hosts = 0, lanes = 0;
  double bytes = 0;
  std::cin >> hosts >> lanes >> bytes;
  std::printf("%d\n", PartsToOverlap(hosts, lanes, static_cast<size_t>(bytes)));
}

std::vector<int> OneRankPerHost(int hosts) {
  std::vector<int> host_of;
  for (int host = 0; host < hosts; ++host) host_of.push_back(host);
  return host_of;
}

void Print(const VirtualNetwork& network, int ranks) {
  size_t messages = 0, sent = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    messages = std::max(messages, network.rank(rank).messages);
    sent = std::max(sent, network.rank(rank).bytes);
  }
  std::printf("%.9g %zu %zu\n", network.Latest(), messages, sent);
}

void Allreduce() {
  int hosts = 0, lanes = 0;
  double bytes = 0, slowness = 1;
  std::string algorithm;
  NetworkCosts costs;
  std::cin >> hosts >> lanes >> bytes >> algorithm >> slowness >> costs;
  costs.per_byte *= lanes;
  const double own_bytes = bytes / lanes;
  const auto allreduce = Algorithm(algorithm, hosts, lanes, own_bytes);
  // Every slice of the ring is one cache line; `scale` accounts for the real size.
  const size_t count = static_cast<size_t>(hosts) * kCacheLine / sizeof(float);
  const double scale = own_bytes / static_cast<double>(count * sizeof(float));
  VirtualNetwork network(OneRankPerHost(hosts), costs, scale);
  network.SlowDown(hosts - 1, slowness);
  network.OnEveryRank([&](Transport& transport) {
    std::vector<float> data(count, 1.0f);
    std::vector<std::byte> scratch;
    auto* memory = reinterpret_cast<std::byte*>(data.data());
    Require(allreduce(transport, Reduction{}, hosts, memory, count, scratch,
                      Deadline::AfterSeconds(kPatience)));
  });
  Print(network, hosts);
}

void Reducescatter() {
  int hosts = 0;
  double bytes = 0;
  std::string name;
  NetworkCosts costs;
  std::cin >> hosts >> bytes >> name >> costs;
  const bool halves =
      name == "ours" ? ScattersByHalving(hosts, static_cast<size_t>(bytes)) : name == "halving";
  const auto reducescatter = halves ? ReducescatterHalving : ReducescatterRing;
  constexpr size_t kFloats = kCacheLine / sizeof(float);
  const size_t count = static_cast<size_t>(hosts) * kFloats;
  const double scale = bytes / static_cast<double>(count * sizeof(float));
  VirtualNetwork network(OneRankPerHost(hosts), costs, scale);
  network.OnEveryRank([&](Transport& transport) {
    const std::vector<float> source(count, 1.0f);
    std::vector<float> target(kFloats);
    std::vector<std::byte> scratch;
    Require(reducescatter(transport, Reduction{}, reinterpret_cast<const std::byte*>(source.data()),
                          reinterpret_cast<std::byte*>(target.data()), EvenSlices(count, hosts),
                          scratch, Deadline::AfterSeconds(kPatience)));
  });
  Print(network, hosts);
}

void Alltoall() {
  int hosts = 0, per_host = 0;
  size_t bytes = 0;
  std::string name;
  NetworkCosts costs;
  std::cin >> hosts >> per_host >> bytes >> name >> costs;
  costs.per_byte *= per_host;  // a rank's share of the link
  const int size = hosts * per_host;
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / per_host);
  VirtualNetwork network(host_of, costs);
  network.OnEveryRank([&](Transport& transport) {
    const std::vector<int64_t> splits(static_cast<size_t>(size), 1);
    const std::vector<std::byte> source(splits.size() * bytes);
    std::vector<std::byte> target(source.size());
    std::vector<std::byte> scratch;
    const auto target_of = [&](const std::vector<int64_t>&) -> Result<Bytes> {
      return Bytes(target.data(), target.size());
    };
    const RowsToSend own{ConstBytes(source.data(), source.size()), splits, bytes};
    const Deadline deadline = Deadline::AfterSeconds(kPatience);
    Require(name == "direct"  ? AlltoallDirect(transport, own, target_of, scratch, deadline)
            : name == "Bruck" ? AlltoallBruck(transport, own, target_of, bytes, scratch, deadline)
                              : AlltoallLinks(transport, own, target_of, scratch, deadline));
  });
  Print(network, size);
}

void Adasum() {
  constexpr size_t kProducts = kCacheLine / 2;  // the bytes of a message without tensor elements
  int hosts = 0, per_host = 0;
  double bytes = 0;
  NetworkCosts costs;
  std::cin >> hosts >> per_host >> bytes >> costs;
  costs.per_byte *= per_host;  // a rank's share of the link
  const int size = hosts * per_host;
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / per_host);
  // The shortest piece of the tensor is one cache line; `scale` accounts for the real size.
  const size_t count = static_cast<size_t>(size) * kCacheLine / sizeof(float);
  const double scale = bytes / static_cast<double>(count * sizeof(float));
  VirtualNetwork network(host_of, costs, scale, kProducts);
  network.OnEveryRank([&](Transport& transport) {
    std::vector<float> data(count, 1.0f);
    Require(AdasumTree(transport, DType::kFloat32, Span<const size_t>(&count, 1),
                       reinterpret_cast<std::byte*>(data.data()),
                       Deadline::AfterSeconds(kPatience)));
  });
  Print(network, size);
}

AddressRecord AddressOf(int rank, int per_host) {
  const std::string host = std::to_string(rank / per_host);
  AddressRecord record;
  record.tcp = {{"10.0.0." + host, 40000}};
  record.unix_name = "sparkhvd-0123456789abcdef0123456789abcdef";
  record.host_key = "host-" + host + "-0123456789abcdef0123456789abcdef";
  record.shared_memory = true;
  record.arena_region_bytes = size_t{4} << 20;
  record.settings_digest = 1;
  return record;
}

// Exchanges what ConnectMesh exchanges through the rendezvous. The links and the arena between it
// are missing, because they need sockets.
void Start() {
  int hosts = 0, per_host = 0;
  NetworkCosts costs;
  std::cin >> hosts >> per_host >> costs;
  const int size = hosts * per_host;
  VirtualStore store(size, costs);
  const NumberRange ranks{0, static_cast<uint32_t>(size)};
  store.OnEveryRank([&](int rank, KeyValueStore& client) {
    const std::string own = "/" + std::to_string(rank);
    Meeting meeting(client, "world", rank, Deadline::AfterSeconds(kPatience), {});
    Require(meeting.Join());
    Require(meeting.Set("address" + own, EncodeAddressRecord(AddressOf(rank, per_host))));
    Require(meeting.GetAll("address", ranks).status());
    Require(meeting.Set("arena" + own, "yes"));
    Require(meeting.GetAll("arena", ranks).status());
    meeting.Leave();
  });
  std::printf("%.9g %zu %zu %zu\n", store.Latest(), store.rank(size - 1).messages,
              store.server().messages, store.server().bytes);
}

void Stragglers() {
  constexpr int kSteps = 500;
  constexpr size_t kFloats = 1024;
  int hosts = 0;
  double mean = 0;
  NetworkCosts costs;
  std::cin >> hosts >> mean >> costs;
  VirtualNetwork network(OneRankPerHost(hosts), costs);
  network.OnEveryRank([&](Transport& transport) {
    const int rank = transport.rank();
    std::seed_seq seed{rank};
    std::mt19937 random(seed);
    std::vector<float> data(kFloats, 1.0f);
    std::vector<std::byte> scratch;
    for (int step = 0; step < kSteps; ++step) {
      // std::exponential_distribution differs between the standard libraries.
      const double uniform = (static_cast<double>(random()) + 0.5) / 0x1p32;
      network.Compute(rank, -mean * std::log(uniform));
      Require(AllreduceDoublingInPlace(transport, Reduction{}, hosts,
                                       reinterpret_cast<std::byte*>(data.data()), kFloats, scratch,
                                       Deadline::AfterSeconds(kPatience)));
    }
  });
  std::printf("%.9g\n", network.Latest() / kSteps - mean);
}

void Broadcast() {
  int hosts = 0;
  double bytes = 0;
  std::string name;
  NetworkCosts costs;
  std::cin >> hosts >> bytes >> name >> costs;
  BroadcastRoute route = SelectBroadcast(hosts, static_cast<size_t>(bytes));
  if (name == "tree") route = BroadcastRoute{};
  // Every piece is one cache line; `scale` accounts for the real size.
  const auto pieces =
      static_cast<size_t>(std::ceil(bytes / static_cast<double>(route.piece_bytes)));
  route.piece_bytes = kCacheLine;
  const double scale = bytes / static_cast<double>(pieces * kCacheLine);
  VirtualNetwork network(OneRankPerHost(hosts), costs, scale);
  network.OnEveryRank([&](Transport& transport) {
    std::vector<std::byte> data(pieces * kCacheLine);
    Require(BroadcastLinks(transport, route, 0, data.data(), Bytes(data.data(), data.size()),
                           Deadline::AfterSeconds(kPatience)));
  });
  Print(network, hosts);
}

}  // namespace
}  // namespace sparkhvd

int main() {
  const std::map<std::string, void (*)()> cases{
      {"negotiate", sparkhvd::Negotiate}, {"allreduce", sparkhvd::Allreduce},
      {"parts", sparkhvd::Parts},         {"reducescatter", sparkhvd::Reducescatter},
      {"broadcast", sparkhvd::Broadcast}, {"alltoall", sparkhvd::Alltoall},
      {"start", sparkhvd::Start},         {"stragglers", sparkhvd::Stragglers},
      {"adasum", sparkhvd::Adasum},
  };
  std::string kind;
  while (std::cin >> kind) {
    const auto found = cases.find(kind);
    if (found == cases.end()) {
      std::cerr << "Unknown case " << kind << "; expected one of:";
      for (const auto& known : cases) std::cerr << " " << known.first;
      std::cerr << "\n";
      return 1;
    }
    found->second();
    std::fflush(stdout);
  }
}
