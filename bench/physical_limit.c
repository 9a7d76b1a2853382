/* What shared memory and the processor allow: a float32 sum over processes of one machine, private buffer to private
 * buffer, in place, with nothing around it: no names, no types, no errors, no waiting for anything but the other processes.
 *
 * Every process owns a slice of every chunk. A chunk takes two steps: show the slices that others own; then reduce the own
 * slice from what the others show, show the result and, after the second step, take the others' results. Chunks are as large
 * as stays in the cache, and the steps of two chunks overlap, so that there is one meeting per chunk. Waiting is spinning.
 *
 *   cc -O3 -march=native -o physical_limit physical_limit.c && ./physical_limit RANKS SECONDS BYTES...
 *
 * Prints one line per size, "BYTES MICROSECONDS": the median over repetitions of the slowest process, for the best of
 * several chunk sizes. Small buffers are reduced by everybody in one step. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 16, LINE = 64, SLOTS = 4, MAX_REPETITIONS = 2000 };
#define LARGEST_CHUNK ((size_t)1 << 20)

struct counter {
  _Alignas(LINE) atomic_ulong value;
};

struct shared {
  struct counter counters[MAX_RANKS];
  double times[MAX_RANKS][MAX_REPETITIONS];
  long repetitions;
};

static struct shared *shared;
static char *slots; /* SLOTS chunks per rank */
static int ranks, rank;
static unsigned long step;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *slot(int owner, size_t index) {
  return slots + ((size_t)owner * SLOTS + index % SLOTS) * LARGEST_CHUNK;
}

static void meet(void) {
  atomic_store_explicit(&shared->counters[rank].value, ++step, memory_order_release);
  for (int r = 0; r < ranks; ++r) {
    for (long spins = 0; atomic_load_explicit(&shared->counters[r].value, memory_order_acquire) < step;) {
      if (++spins > 10000) sched_yield(); /* more processes than processors */
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

static void add(float *restrict target, const float *restrict other, size_t count) {
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

/* The three parts of a chunk. */
static void show(const float *data, size_t count, size_t index) {
  float *own = (float *)slot(rank, index);
  for (int r = 0; r < ranks; ++r) {
    const struct slice s = slice_of(count, r);
    if (r != rank) memcpy(own + s.begin, data + s.begin, s.count * sizeof(float));
  }
}

static void reduce(float *data, size_t count, size_t index) {
  enum { BLOCK = 2048 };
  const struct slice s = slice_of(count, rank);
  float *result = (float *)slot(rank, index) + s.begin;
  for (size_t done = 0; done < s.count; done += BLOCK) {
    const size_t part = s.count - done < BLOCK ? s.count - done : BLOCK;
    float *own = data + s.begin + done;
    for (int r = 0; r < ranks; ++r) {
      if (r != rank) add(own, (const float *)slot(r, index) + s.begin + done, part);
    }
    memcpy(result + done, own, part * sizeof(float));
  }
}

static void take(float *data, size_t count, size_t index) {
  for (int r = 0; r < ranks; ++r) {
    const struct slice s = slice_of(count, r);
    if (r != rank) memcpy(data + s.begin, (const float *)slot(r, index) + s.begin, s.count * sizeof(float));
  }
}

static void allreduce(float *data, size_t count, size_t chunk) {
  static size_t round;
  if (count * sizeof(float) <= 16384) { /* one step: everybody reduces everything */
    memcpy(slot(rank, round), data, count * sizeof(float));
    meet();
    for (int r = 0; r < ranks; ++r) {
      if (r != rank) add(data, (const float *)slot(r, round), count);
    }
    ++round;
    return;
  }
  const size_t per_chunk = chunk / sizeof(float);
  const size_t chunks = (count + per_chunk - 1) / per_chunk;
  for (size_t i = 0; i < chunks + 2; ++i) {
    for (size_t stage = 3; stage-- > 0;) {
      if (i < stage || i - stage >= chunks) continue;
      const size_t c = i - stage;
      float *at = data + c * per_chunk;
      const size_t n = count - c * per_chunk < per_chunk ? count - c * per_chunk : per_chunk;
      if (stage == 0) show(at, n, round + c);
      if (stage == 1) reduce(at, n, round + c);
      if (stage == 2) take(at, n, round + c);
    }
    if (i < chunks + 1) meet();
  }
  round += chunks + 1;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median time of the slowest process; the same on all of them. */
static double measure(float *data, size_t count, size_t chunk, double seconds) {
  static double slowest[MAX_REPETITIONS];
  double once = 0;
  for (int i = 0; i < 3; ++i) {
    meet();
    const double start = now();
    allreduce(data, count, chunk);
    once = now() - start;
  }
  if (rank == 0) {
    const double wanted = seconds / once;
    shared->repetitions = wanted < 5 ? 5 : wanted > MAX_REPETITIONS ? MAX_REPETITIONS : (long)wanted;
  }
  meet();
  const long repetitions = shared->repetitions;
  for (long i = 0; i < repetitions; ++i) {
    meet();
    const double start = now();
    allreduce(data, count, chunk);
    shared->times[rank][i] = now() - start;
  }
  meet();
  for (long i = 0; i < repetitions; ++i) {
    slowest[i] = 0;
    for (int r = 0; r < ranks; ++r) {
      if (shared->times[r][i] > slowest[i]) slowest[i] = shared->times[r][i];
    }
  }
  meet();
  qsort(slowest, (size_t)repetitions, sizeof(double), ascending);
  return slowest[repetitions / 2];
}

static void check(size_t chunk) {
  const size_t count = 100003;
  float *data = malloc(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) data[i] = (float)(i % 1009) * (float)(rank + 1);
  allreduce(data, count, chunk);
  for (size_t i = 0; i < count; ++i) {
    if (data[i] != (float)(i % 1009) * (float)(ranks * (ranks + 1) / 2)) {
      fprintf(stderr, "rank %d: wrong result at %zu\n", rank, i);
      exit(1);
    }
  }
  free(data);
}

int main(int argc, char **argv) {
  if (argc < 4 || (ranks = atoi(argv[1])) < 2 || ranks > MAX_RANKS) {
    fprintf(stderr, "usage: %s RANKS SECONDS BYTES...\n", argv[0]);
    return 2;
  }
  const double seconds = atof(argv[2]);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  slots = mmap(NULL, (size_t)ranks * SLOTS * LARGEST_CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || slots == MAP_FAILED) return 1;
  for (int r = 1; r < ranks && rank == 0; ++r) {
    if (fork() == 0) rank = r;
  }
  const size_t sizes[] = {(size_t)64 << 10, (size_t)128 << 10, (size_t)256 << 10, (size_t)512 << 10};
  for (size_t k = 0; k < 4; ++k) check(sizes[k]);
  for (int argument = 3; argument < argc; ++argument) {
    const size_t bytes = (size_t)atoll(argv[argument]);
    float *data = calloc(bytes / sizeof(float), sizeof(float));
    memset(data, 0, bytes);
    double best = 1e9;
    for (size_t k = 0; k < 4; ++k) {
      const double time = measure(data, bytes / sizeof(float), sizes[k], seconds / 4);
      if (rank == 0 && getenv("VERBOSE")) fprintf(stderr, "%zu chunk %zu: %.1f us\n", bytes, sizes[k], time * 1e6);
      if (time < best) best = time;
    }
    if (rank == 0) {
      printf("%zu %.2f\n", bytes, best * 1e6);
      fflush(stdout);
    }
    free(data);
  }
  if (rank == 0) {
    while (wait(NULL) > 0) continue;
  }
  return 0;
}
