/* The limit of shared memory and the processor: a float32 sum in place, from private buffer to
 * private buffer, over processes of one machine. It has no names, types or errors, and waits only
 * for the other processes. bench/collectives.py loads it as a library.
 *
 * Every process owns a slice of every chunk. A chunk has three stages: show the slices that others
 * own; reduce the own slice with what the others show, and show the result; take the results of
 * the others. A chunk fits into the cache. The stages of consecutive chunks overlap, so there is
 * one barrier per chunk. A process that waits spins without a timeout. Small buffers need one
 * barrier, after which every process reduces everything. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

enum { kMaxRanks = 16, kLine = 64, kSlots = 4, kSmallBytes = 16384, kBlock = 2048 };
#define CHUNK_LIMIT ((size_t)1 << 20)

struct counter {
  _Alignas(64) atomic_ulong value;
};

static struct counter* counters; /* by rank, at the start of the shared memory */
static char* slots;              /* behind them: kSlots chunks per rank */
static int ranks, rank;
static unsigned long step;

size_t limit_bytes(int count) {
  return kMaxRanks * sizeof(struct counter) + (size_t)count * kSlots * CHUNK_LIMIT;
}

/* `file` is zeroed, has limit_bytes(count) bytes and is the same on all ranks. */
int limit_open(int file, int own, int count) {
  void* memory = mmap(NULL, limit_bytes(count), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED || count > kMaxRanks) return -1;
  counters = memory;
  slots = (char*)memory + kMaxRanks * sizeof(struct counter);
  rank = own;
  ranks = count;
  return 0;
}

static char* slot(int owner, size_t index) {
  return slots + ((size_t)owner * kSlots + index % kSlots) * CHUNK_LIMIT;
}

static void barrier(void) {
  atomic_store_explicit(&counters[rank].value, ++step, memory_order_release);
  for (int r = 0; r < ranks; ++r) {
    for (long spins = 0; atomic_load_explicit(&counters[r].value, memory_order_acquire) < step;) {
      if (++spins > 10000) sched_yield(); /* more processes than processors */
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

static void add(float* restrict target, const float* restrict other, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] += other[i];
}

struct slice {
  size_t begin, count;
};

static struct slice slice_of(size_t count, int owner) {
  const size_t lines = (count + 15) / 16;
  const size_t first = lines * (size_t)owner / (size_t)ranks * 16;
  const size_t last = lines * ((size_t)owner + 1) / (size_t)ranks * 16;
  const size_t begin = first < count ? first : count;
  return (struct slice){begin, (last < count ? last : count) - begin};
}

static void show(const float* data, size_t count, size_t index) {
  float* own = (float*)slot(rank, index);
  for (int r = 0; r < ranks; ++r) {
    const struct slice s = slice_of(count, r);
    if (r != rank) memcpy(own + s.begin, data + s.begin, s.count * sizeof(float));
  }
}

static void reduce(float* data, size_t count, size_t index) {
  const struct slice s = slice_of(count, rank);
  float* result = (float*)slot(rank, index) + s.begin;
  for (size_t done = 0; done < s.count; done += kBlock) {
    const size_t part = s.count - done < kBlock ? s.count - done : kBlock;
    float* own = data + s.begin + done;
    for (int r = 0; r < ranks; ++r) {
      if (r != rank) add(own, (const float*)slot(r, index) + s.begin + done, part);
    }
    memcpy(result + done, own, part * sizeof(float));
  }
}

static void take(float* data, size_t count, size_t index) {
  for (int r = 0; r < ranks; ++r) {
    const struct slice s = slice_of(count, r);
    if (r == rank) continue;
    memcpy(data + s.begin, (const float*)slot(r, index) + s.begin, s.count * sizeof(float));
  }
}

void limit_allreduce(float* data, size_t count, size_t chunk_bytes) {
  static size_t round;
  if (count * sizeof(float) <= kSmallBytes) {
    memcpy(slot(rank, round), data, count * sizeof(float));
    barrier();
    for (int r = 0; r < ranks; ++r) {
      if (r != rank) add(data, (const float*)slot(r, round), count);
    }
    ++round;
    return;
  }
  const size_t chunk = chunk_bytes / sizeof(float);
  const size_t chunks = (count + chunk - 1) / chunk;
  for (size_t now = 0; now < chunks + 2; ++now) {
    for (size_t stage = 3; stage-- > 0;) {
      if (now < stage || now - stage >= chunks) continue;
      const size_t index = now - stage;
      float* at = data + index * chunk;
      const size_t left = count - index * chunk;
      const size_t part = left < chunk ? left : chunk;
      if (stage == 0) show(at, part, round + index);
      if (stage == 1) reduce(at, part, round + index);
      if (stage == 2) take(at, part, round + index);
    }
    if (now < chunks + 1) barrier();
  }
  round += chunks + 1;
}
