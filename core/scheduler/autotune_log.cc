#include "scheduler/autotune_log.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <utility>

#include "base/io_status.h"

namespace sparkhvd {
namespace {

constexpr std::array<const char*, 3> kStages = {"warm-up", "search", "final"};

}  // namespace

Result<std::shared_ptr<AutotuneLog>> AutotuneLog::Open(const std::string& path) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  if (!file) return IoStatus("cannot write the autotuning log '" + path + "'", errno);
  file << "stage,fusion_threshold,small_allreduce,allreduce_chunk,hierarchical_allreduce,"
          "bytes_per_second"
       << std::endl;
  return std::make_shared<AutotuneLog>(std::move(file));
}

void AutotuneLog::Write(const TuningSample& sample) {
  const Tunables& tunables = sample.tunables;
  file_ << kStages[static_cast<size_t>(sample.stage)] << ',' << tunables.fusion_threshold << ','
        << tunables.arena.small_bytes << ',' << tunables.arena.chunk_bytes << ','
        << tunables.hierarchical << ',' << std::llround(sample.score) << std::endl;
}

}  // namespace sparkhvd
