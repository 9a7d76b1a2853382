// A library that simulates the functions of the CUDA driver and of NCCL that the core uses, in host
// memory. Tests load it instead of the real libraries. Streams are threads. Ranks are threads of
// one process, each with its own device. The functions below control the simulation:
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#define SIMULATED_EXPORT __attribute__((visibility("default")))

struct CUstream_st;

namespace simulated {

constexpr int kDevices = 8;

// Creates a stream of the program, as torch does.
SIMULATED_EXPORT CUstream_st* NewStream(int ordinal);
// Waits for the stream's work, then destroys the stream.
SIMULATED_EXPORT void DeleteStream(CUstream_st* stream);
SIMULATED_EXPORT void AwaitStream(CUstream_st* stream);

// No work on the device's streams begins between these two calls.
SIMULATED_EXPORT void Hold(int ordinal);
SIMULATED_EXPORT void Release(int ordinal);

// The next call of `function`, on any rank, returns this result and does nothing else.
SIMULATED_EXPORT void FailNext(const char* function, int result);

// Sets the result of ncclCommGetAsyncError for all current communicators.
SIMULATED_EXPORT void BreakCommunicators(int result);

SIMULATED_EXPORT void SetNcclVersion(int version);
SIMULATED_EXPORT int Calls(const char* function);  // number so far
SIMULATED_EXPORT size_t Allocations();             // not freed yet
SIMULATED_EXPORT size_t Events();                  // not destroyed yet

// Returns the misuses since the last call, one line each. On a real device, they would cause a
// deadlock, wrong results or a crash. Examples are launches of several communicators in different
// orders, communicators that end before other ranks have received all data, and handles that are
// used after their end.
SIMULATED_EXPORT std::vector<std::string> TakeMisuses();

}  // namespace simulated
