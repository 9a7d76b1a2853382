// A library with the functions of CUDA's driver and of NCCL that are used, on memory of the host:
// what the tests load in their place. Streams are threads; ranks are threads of one process, each
// with a device of its own. What a test does to it:
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#define SIMULATED_EXPORT __attribute__((visibility("default")))

struct CUstream_st;

namespace simulated {

constexpr int kDevices = 8;

// A stream of the program, as torch has them.
SIMULATED_EXPORT CUstream_st* NewStream(int ordinal);
// Waits for what is on it first.
SIMULATED_EXPORT void DeleteStream(CUstream_st* stream);
SIMULATED_EXPORT void AwaitStream(CUstream_st* stream);

// Nothing on the device's streams begins between these two.
SIMULATED_EXPORT void Hold(int ordinal);
SIMULATED_EXPORT void Release(int ordinal);

// The next call of `function`, by any rank, has this result and does nothing else.
SIMULATED_EXPORT void FailNext(const char* function, int result);

// What ncclCommGetAsyncError says of every communicator that there is now.
SIMULATED_EXPORT void BreakCommunicators(int result);

SIMULATED_EXPORT void SetNcclVersion(int version);
SIMULATED_EXPORT int Calls(const char* function);  // so far
SIMULATED_EXPORT size_t Allocations();             // that were not given back
SIMULATED_EXPORT size_t Events();                  // that were not destroyed

// What a real device would punish with a deadlock, wrong results or a crash, one line each, since
// it was last asked: launches of several communicators in different orders, communicators that end
// before other ranks have all of theirs, and handles that are used after their end.
SIMULATED_EXPORT std::vector<std::string> TakeMisuses();

}  // namespace simulated
