// Connects ranks that are threads of this process, for the contract suites.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadlines.h"
#include "rendezvous/in_process_store.h"
#include "transport/mesh.h"

namespace sparkhvd {

// Runs `body` for every rank on a separate thread.
inline void ForEachRank(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

inline MeshOptions OptionsOf(int rank, int size) {
  MeshOptions options;
  options.rank = rank;
  options.size = size;
  options.token = "secret";
  options.scope = "test";
  options.host_key = "this host";
  options.arena_region_bytes = 10'000;
  return options;
}

// Returns the result of ConnectMesh on each rank. `change` adapts the options.
inline std::vector<Result<Mesh>> TryConnect(int size,
                                            const std::function<void(MeshOptions*)>& change,
                                            Deadline deadline = Late()) {
  InProcessStore store;
  std::vector<Result<Mesh>> results;
  for (int rank = 0; rank < size; ++rank)
    results.push_back(Status(StatusCode::kInternal, "not run"));
  ForEachRank(size, [&](int rank) {
    MeshOptions options = OptionsOf(rank, size);
    if (change) change(&options);
    results[static_cast<size_t>(rank)] = ConnectMesh(options, store, deadline);
  });
  return results;
}

inline std::vector<Mesh> Connect(int size, const std::function<void(MeshOptions*)>& change = {}) {
  std::vector<Mesh> meshes;
  for (Result<Mesh>& result : TryConnect(size, change)) {
    EXPECT_TRUE(result.ok()) << result.status().message();
    meshes.push_back(result.ok() ? std::move(result).value() : Mesh());
  }
  return meshes;
}

// Connects all ranks again, through the memory that they share.
inline std::vector<Mesh> ConnectNeighbors(const std::vector<Mesh>& meshes,
                                          const std::function<void(MeshOptions*)>& change = {}) {
  return Connect(static_cast<int>(meshes.size()), [&](MeshOptions* options) {
    options->scope = "neighbors";
    options->neighbors = meshes[static_cast<size_t>(options->rank)].watches.lock();
    if (change) change(options);
  });
}

struct MeshKind {
  const char* name;
  std::vector<Mesh> (*make)(int size);
};

inline void PrintTo(const MeshKind& kind, std::ostream* out) { *out << kind.name; }

inline std::string KindName(const ::testing::TestParamInfo<MeshKind>& info) {
  return info.param.name;
}

}  // namespace sparkhvd
