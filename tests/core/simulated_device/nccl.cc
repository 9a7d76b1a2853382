#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "simulated_device/device.h"

namespace {

using simulated::CountCall;
using simulated::TheShared;

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError, kInProgress };
enum Type { kInt8, kUint8, kInt32, kInt64 = 4, kFloat16 = 6, kFloat32, kFloat64, kBfloat16 };
enum Operator { kSum, kProduct, kMax, kMin, kAverage };
enum class Kind { kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kSend, kReceive };

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

// One rank's call.
struct Part {
  Kind kind;
  const char* source;
  char* target;
  size_t count;
  int type;
  int op;    // of a reduction
  int peer;  // of a transfer, or the root
};
using Parts = std::vector<Part>;

size_t SizeOf(int type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    default:
      return 8;
  }
}

#if defined(__aarch64__)
using Float16 = __fp16;  // before version 13, GCC has no _Float16 here
#else
using Float16 = _Float16;
#endif

struct Bfloat16 {
  uint16_t bits;
  explicit Bfloat16(double value) : bits(0) {
    const auto single = static_cast<float>(value);
    uint32_t word = 0;
    std::memcpy(&word, &single, sizeof(word));
    bits = static_cast<uint16_t>(word >> 16);  // exact for the values of the tests
  }
  explicit operator double() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float single = 0;
    std::memcpy(&single, &word, sizeof(single));
    return static_cast<double>(single);
  }
};

double Combine(int op, double left, double right) {
  switch (op) {
    case kProduct:
      return left * right;
    case kMax:
      return left > right ? left : right;
    case kMin:
      return left < right ? left : right;
    default:
      return left + right;
  }
}

template <typename T>
void Reduce(const std::vector<const char*>& sources, char* target, size_t count, int op) {
  std::vector<T> results;
  for (size_t i = 0; i < count; ++i) {
    const auto of = [&](const char* source) {
      T value(0);
      std::memcpy(&value, source + i * sizeof(T), sizeof(T));
      return static_cast<double>(value);
    };
    double result = of(sources[0]);
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      result = Combine(op, result, of(sources[rank]));
    }
    if (op == kAverage) result /= static_cast<double>(sources.size());
    results.push_back(static_cast<T>(result));
  }
  if (count > 0) std::memcpy(target, results.data(), count * sizeof(T));
}

// Returns the bytes of the reduction of `count` elements from every rank.
std::vector<char> Reduced(const std::vector<const char*>& sources, const Part& part, size_t count) {
  std::vector<char> result(count * SizeOf(part.type));
  using Reducer = void (*)(const std::vector<const char*>&, char*, size_t, int);
  const std::map<int, Reducer> reducers = {
      {kInt8, Reduce<int8_t>},    {kUint8, Reduce<uint8_t>},     {kInt32, Reduce<int32_t>},
      {kInt64, Reduce<int64_t>},  {kFloat16, Reduce<Float16>},   {kFloat32, Reduce<float>},
      {kFloat64, Reduce<double>}, {kBfloat16, Reduce<Bfloat16>},
  };
  reducers.at(part.type)(sources, result.data(), count, part.op);
  return result;
}

void Copy(char* target, const char* source, size_t bytes) {
  if (bytes > 0) std::memmove(target, source, bytes);
}

// Executes one group of calls from each rank of a communicator. Run returns false if the ranks
// disagree.
class GroupExecution {
 public:
  explicit GroupExecution(std::vector<Parts> by_rank) : by_rank_(std::move(by_rank)) {}

  bool Run() {
    std::vector<size_t> position(by_rank_.size(), 0);
    while (true) {
      std::vector<Part*> calls;
      for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
        Parts& parts = by_rank_[rank];
        size_t& next = position[rank];
        while (next < parts.size() && IsTransfer(parts[next])) ++next;
        if (next < parts.size()) calls.push_back(&parts[next++]);
      }
      if (calls.empty()) return Transfer();
      if (calls.size() != by_rank_.size() || !Collective(calls)) return false;
    }
  }

 private:
  static bool IsTransfer(const Part& part) {
    return part.kind == Kind::kSend || part.kind == Kind::kReceive;
  }

  static bool Collective(const std::vector<Part*>& parts) {
    const Part& first = *parts[0];
    std::vector<const char*> sources;
    for (const Part* part : parts) {
      if (part->kind != first.kind || part->count != first.count || part->type != first.type ||
          part->op != first.op || part->peer != first.peer) {
        return false;
      }
      sources.push_back(part->source);
    }
    const size_t bytes = first.count * SizeOf(first.type);
    const auto root = static_cast<size_t>(first.peer);
    if (first.kind == Kind::kBroadcast) {
      const std::vector<char> content(sources[root], sources[root] + bytes);
      for (const Part* part : parts) Copy(part->target, content.data(), bytes);
    } else if (first.kind == Kind::kAllGather) {
      for (const Part* part : parts) {
        for (size_t rank = 0; rank < parts.size(); ++rank) {
          Copy(part->target + rank * bytes, sources[rank], bytes);
        }
      }
    } else if (first.kind == Kind::kReduceScatter) {
      const std::vector<char> all = Reduced(sources, first, first.count * parts.size());
      for (size_t rank = 0; rank < parts.size(); ++rank) {
        Copy(parts[rank]->target, all.data() + rank * bytes, bytes);
      }
    } else {
      const std::vector<char> all = Reduced(sources, first, first.count);
      for (size_t rank = 0; rank < parts.size(); ++rank) {
        if (first.kind == Kind::kAllReduce || rank == root) {
          Copy(parts[rank]->target, all.data(), bytes);
        }
      }
    }
    return true;
  }

  // Matches every send with a receive of the same length.
  bool Transfer() {
    std::map<std::pair<size_t, size_t>, std::vector<const Part*>> sent;
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
      for (const Part& part : by_rank_[rank]) {
        const auto peer = static_cast<size_t>(part.peer);
        if (part.kind == Kind::kSend) sent[{rank, peer}].push_back(&part);
      }
    }
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
      for (const Part& part : by_rank_[rank]) {
        if (part.kind != Kind::kReceive) continue;
        std::vector<const Part*>& sends = sent[{static_cast<size_t>(part.peer), rank}];
        if (sends.empty() || sends[0]->count != part.count) return false;
        Copy(part.target, sends[0]->source, part.count * SizeOf(part.type));
        sends.erase(sends.begin());
      }
    }
    for (const auto& [route, unmatched] : sent) {
      if (!unmatched.empty()) return false;
    }
    return true;
  }

  std::vector<Parts> by_rank_;
};

// The ranks that share one id. Guarded by the shared mutex.
struct World {
  struct Round {
    std::map<int, Parts> parts;
    std::list<std::vector<char>> taken;  // data of ranks that have continued
    bool done = false;
  };
  int number = 0;
  int size = 0;
  std::set<int> devices;
  std::set<int> ranks;
  bool a_rank_left = false;  // implies that all ranks have connected
  std::map<uint64_t, Round> rounds;
  int failure = 0;
};

struct State {
  std::shared_ptr<World> world;
  int rank = 0;
  int ordinal = 0;
  uint64_t groups = 0;
  int in_background = 0;  // number of polls until the background work is done
  int failure = 0;
  bool aborted = false;
  bool finalized = false;
  int running = 0;
  std::set<uint64_t> left_early;  // rounds that this rank completed before all others joined
};

std::map<std::string, std::shared_ptr<World>>& Worlds() {
  static std::map<std::string, std::shared_ptr<World>> worlds;
  return worlds;
}

std::set<std::shared_ptr<State>>& Communicators() {
  static std::set<std::shared_ptr<State>> communicators;
  return communicators;
}

simulated::Handles& TheHandles() {
  // Never destroyed, so that LeakSanitizer can still reach an abandoned communicator and does not
  // report it as a leak.
  static auto* const handles = new simulated::Handles("a communicator");
  return *handles;
}

// Records the launches of each device, in order. Ranks must launch any two groups that they share
// in the same order. Guarded by the shared mutex.
class Launches {
 public:
  using Group = std::pair<int, uint64_t>;  // world and round

  void Add(int device, const Group& group) {
    for (const auto& [other, launched] : by_device_) {
      if (other == device) continue;
      const auto same = std::find(launched.begin(), launched.end(), group);
      if (same == launched.end()) continue;
      for (const Group& before : by_device_[device]) {
        if (std::find(same, launched.end(), before) == launched.end()) continue;
        simulated::RecordMisuse("devices " + std::to_string(device) + " and " +
                                std::to_string(other) +
                                " launch the collectives of two communicators in different orders");
        return;
      }
    }
    by_device_[device].push_back(group);
  }

  void Forget(int world) {
    for (auto& [device, launched] : by_device_) {
      const auto gone = [world](const Group& group) { return group.first == world; };
      launched.erase(std::remove_if(launched.begin(), launched.end(), gone), launched.end());
    }
  }

 private:
  std::map<int, std::vector<Group>> by_device_;
};

Launches& TheLaunches() {
  static Launches launches;
  return launches;
}

std::atomic<int> version{22907};

// Returns whether this rank only sends data in the round. If so, NCCL copies the data and does not
// wait for the receivers.
bool OnlySends(const Parts& parts, int rank) {
  return std::all_of(parts.begin(), parts.end(), [rank](const Part& part) {
    return part.kind == Kind::kBroadcast && part.peer == rank;
  });
}

// Runs on a stream. Waits for the groups of the other ranks with the same number.
void Run(const std::shared_ptr<State>& state, uint64_t number, Parts parts) {
  std::unique_lock<std::mutex> lock(TheShared().mutex);
  World& world = *state->world;
  World::Round& round = world.rounds[number];
  const bool only_sends = world.size > 1 && OnlySends(parts, state->rank);
  if (only_sends) {  // the program may write to its source from here on
    for (Part& part : parts) {
      const size_t bytes = part.count * SizeOf(part.type);
      if (part.target != part.source) Copy(part.target, part.source, bytes);
      round.taken.emplace_back(part.source, part.source + bytes);
      part.source = round.taken.back().data();
      part.target = round.taken.back().data();
    }
  }
  if (!state->aborted) round.parts[state->rank] = std::move(parts);
  if (!round.done && static_cast<int>(round.parts.size()) == world.size && world.failure == 0) {
    std::vector<Parts> by_rank;
    for (auto& [rank, calls] : round.parts) by_rank.push_back(calls);
    if (!GroupExecution(std::move(by_rank)).Run()) world.failure = kInvalidUsage;
    round.done = true;
    TheShared().changed.notify_all();
  }
  if (only_sends && !round.done && !state->aborted) {
    state->left_early.insert(number);
  } else {
    TheShared().changed.wait(lock, [&] { return round.done || state->aborted; });
    if (!round.done) round.parts.erase(state->rank);
  }
  --state->running;
  TheShared().changed.notify_all();
}

}  // namespace

struct ncclComm {
  std::shared_ptr<State> state = std::make_shared<State>();
};

namespace {

// The calls of this thread's open group.
struct Group {
  int depth = 0;
  ncclComm* communicator = nullptr;
  CUstream_st* stream = nullptr;
  Parts parts;
};

Group& TheGroup() {
  thread_local Group group;
  return group;
}

int Add(const char* function, ncclComm* communicator, CUstream_st* stream, const Part& part) {
  const int result = CountCall(function);
  if (result != 0) return result;
  if (!TheHandles().Alive(communicator, function)) return kInvalidArgument;
  Group& group = TheGroup();
  if (group.depth == 0 || stream->ordinal != communicator->state->ordinal) return kInvalidUsage;
  if (part.count == 0 || part.type > kBfloat16) return kInvalidArgument;
  group.communicator = communicator;
  group.stream = stream;
  group.parts.push_back(part);
  return kInProgress;
}

}  // namespace

namespace simulated {

void BreakCommunicators(int result) {
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  for (const auto& state : Communicators()) state->failure = result;
}

void SetNcclVersion(int number) { version = number; }

}  // namespace simulated

extern "C" {

SIMULATED_EXPORT int ncclCommAbort(ncclComm* communicator);

SIMULATED_EXPORT int ncclGetVersion(int* number) {
  *number = version;
  return kSuccess;
}

SIMULATED_EXPORT const char* ncclGetErrorString(int) { return "simulated error"; }
SIMULATED_EXPORT const char* ncclGetLastError(ncclComm*) { return "details"; }

SIMULATED_EXPORT int ncclGetUniqueId(Id* id) {
  static std::atomic<int> next{0};
  std::memset(id, 0, sizeof(*id));
  const std::string text = "world " + std::to_string(++next);
  std::memcpy(id->bytes, text.data(), text.size());
  return CountCall("ncclGetUniqueId");
}

SIMULATED_EXPORT int ncclCommInitRankConfig(ncclComm** communicator, int size, Id id, int rank,
                                            Config* config) {
  const int result = CountCall("ncclCommInitRankConfig");
  if (result != 0) return result;
  const int device = CurrentDevice();
  if (config->magic != 0xcafebeef || config->size != 24 || config->version != 21400 ||
      config->blocking != 0 || device < 0 || rank < 0 || rank >= size) {
    return kInvalidArgument;
  }
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  std::shared_ptr<World>& world = Worlds()[id.bytes];
  if (!world) {
    world = std::make_shared<World>();
    world->number = static_cast<int>(Worlds().size());
  }
  world->size = size;
  if (!world->devices.insert(device).second || !world->ranks.insert(rank).second) {
    world->failure = kInvalidUsage;  // all ranks learn of the failure
    return kInvalidUsage;
  }
  *communicator = new ncclComm();
  TheHandles().Add(*communicator);
  State& state = *(*communicator)->state;
  state.world = world;
  state.rank = rank;
  state.ordinal = device;
  state.in_background = 2;
  Communicators().insert((*communicator)->state);
  return kInProgress;
}

SIMULATED_EXPORT int ncclCommFinalize(ncclComm* communicator) {
  const int result = CountCall("ncclCommFinalize");
  if (result != 0) return result;
  if (!TheHandles().Alive(communicator, "ncclCommFinalize")) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  communicator->state->finalized = true;
  communicator->state->in_background = 2;
  return kInProgress;
}

SIMULATED_EXPORT int ncclCommDestroy(ncclComm* communicator) {
  if (!TheHandles().Alive(communicator, "ncclCommDestroy")) return kInvalidArgument;
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    if (!communicator->state->finalized || communicator->state->in_background > 0) {
      simulated::RecordMisuse("ncclCommDestroy was called before ncclCommFinalize had completed");
    }
  }
  const int aborted = ncclCommAbort(communicator);
  return aborted == 0 ? CountCall("ncclCommDestroy") : aborted;
}

SIMULATED_EXPORT int ncclCommAbort(ncclComm* communicator) {
  if (!TheHandles().Alive(communicator, "ncclCommAbort")) return kInvalidArgument;
  TheHandles().Remove(communicator);
  {
    std::unique_lock<std::mutex> lock(TheShared().mutex);
    State& state = *communicator->state;
    state.aborted = true;
    for (const uint64_t number : state.left_early) {
      World::Round& round = state.world->rounds[number];
      if (round.done) continue;
      round.parts.erase(state.rank);
      if (state.world->failure == 0) state.world->failure = kRemoteError;
      simulated::RecordMisuse("rank " + std::to_string(state.rank) +
                              " ended its communicator while others still received from it");
    }
    state.world->ranks.erase(state.rank);
    state.world->a_rank_left = true;
    if (state.world->ranks.empty()) TheLaunches().Forget(state.world->number);
    Communicators().erase(communicator->state);
    TheShared().changed.notify_all();
    // Do not wait for the work that a held stream has not begun: it does nothing after the release.
    TheShared().changed.wait(lock, [&] {
      return state.running == 0 || TheShared().held[static_cast<size_t>(state.ordinal)];
    });
  }
  delete communicator;
  return CountCall("ncclCommAbort");
}

SIMULATED_EXPORT int ncclCommGetAsyncError(ncclComm* communicator, int* result) {
  if (!TheHandles().Alive(communicator, "ncclCommGetAsyncError")) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  State& state = *communicator->state;
  const World& world = *state.world;
  if (state.failure != 0 || world.failure != 0) {
    *result = state.failure != 0 ? state.failure : world.failure;
  } else if ((static_cast<int>(world.ranks.size()) < world.size && !world.a_rank_left) ||
             state.in_background > 0) {
    if (state.in_background > 0) --state.in_background;
    *result = kInProgress;
  } else {
    *result = kSuccess;
  }
  return CountCall("ncclCommGetAsyncError");
}

SIMULATED_EXPORT int ncclGroupStart() {
  ++TheGroup().depth;
  return CountCall("ncclGroupStart");
}

SIMULATED_EXPORT int ncclGroupEnd() {
  Group& group = TheGroup();
  if (--group.depth > 0) return kSuccess;
  const Group ended = std::exchange(group, Group{});
  const int result = CountCall("ncclGroupEnd");
  if (result != 0 || ended.communicator == nullptr) return result;
  const std::shared_ptr<State> state = ended.communicator->state;
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    number = state->groups++;
    TheLaunches().Add(state->ordinal, {state->world->number, number});
    ++state->running;
    state->in_background = 2;
  }
  ended.stream->Put([state, number, parts = ended.parts] { Run(state, number, parts); });
  return kInProgress;
}

SIMULATED_EXPORT int ncclAllReduce(const void* source, void* target, size_t count, int type, int op,
                                   ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclAllReduce", communicator, stream,
             Part{Kind::kAllReduce, static_cast<const char*>(source), static_cast<char*>(target),
                  count, type, op, 0});
}

SIMULATED_EXPORT int ncclReduce(const void* source, void* target, size_t count, int type, int op,
                                int root, ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclReduce", communicator, stream,
             Part{Kind::kReduce, static_cast<const char*>(source), static_cast<char*>(target),
                  count, type, op, root});
}

SIMULATED_EXPORT int ncclReduceScatter(const void* source, void* target, size_t count, int type,
                                       int op, ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclReduceScatter", communicator, stream,
             Part{Kind::kReduceScatter, static_cast<const char*>(source),
                  static_cast<char*>(target), count, type, op, 0});
}

SIMULATED_EXPORT int ncclBroadcast(const void* source, void* target, size_t count, int type,
                                   int root, ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclBroadcast", communicator, stream,
             Part{Kind::kBroadcast, static_cast<const char*>(source), static_cast<char*>(target),
                  count, type, kSum, root});
}

SIMULATED_EXPORT int ncclAllGather(const void* source, void* target, size_t count, int type,
                                   ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclAllGather", communicator, stream,
             Part{Kind::kAllGather, static_cast<const char*>(source), static_cast<char*>(target),
                  count, type, kSum, 0});
}

SIMULATED_EXPORT int ncclSend(const void* source, size_t count, int type, int peer,
                              ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclSend", communicator, stream,
             Part{Kind::kSend, static_cast<const char*>(source), nullptr, count, type, kSum, peer});
}

SIMULATED_EXPORT int ncclRecv(void* target, size_t count, int type, int peer,
                              ncclComm* communicator, CUstream_st* stream) {
  return Add("ncclRecv", communicator, stream,
             Part{Kind::kReceive, nullptr, static_cast<char*>(target), count, type, kSum, peer});
}

}  // extern "C"
