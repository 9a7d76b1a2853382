// The few functions of CUDA's driver that are used, found while the program runs: nothing of CUDA
// is needed to build, and where it is missing everything else works.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/status.h"

// Names of the driver's binary interface.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;

namespace sparkhvd {

using CudaContext = CUctx_st*;
using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;
using CudaAddress = unsigned long long;  // the driver's own words  NOLINT

// Results of the driver's functions.
constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;

struct CudaFunctions {
  int (*init)(unsigned flags);
  int (*get_error_string)(int result, const char** text);
  int (*device_get)(int* device, int ordinal);
  int (*primary_context_retain)(CudaContext* context, int device);
  int (*primary_context_release)(int device);
  int (*context_push)(CudaContext context);
  int (*context_pop)(CudaContext* context);
  int (*stream_create)(CudaStream* stream, unsigned flags);
  int (*stream_destroy)(CudaStream stream);
  int (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  int (*event_create)(CudaEvent* event, unsigned flags);
  int (*event_destroy)(CudaEvent event);
  int (*event_record)(CudaEvent event, CudaStream stream);
  int (*event_query)(CudaEvent event);
  int (*memory_allocate)(CudaAddress* address, size_t bytes, CudaStream stream);
  int (*memory_free)(CudaAddress address, CudaStream stream);
  int (*copy_on_device)(CudaAddress target, CudaAddress source, size_t bytes, CudaStream stream);
  int (*copy_to_device)(CudaAddress target, const void* source, size_t bytes, CudaStream stream);

  // What a `result` of `call` means; kIo unless it is success.
  Status Check(const char* call, int result) const;
};

// Loads and initializes the driver; fails with kIo where there is none, or no device.
Result<std::shared_ptr<const CudaFunctions>> LoadCuda(const std::string& path);

}  // namespace sparkhvd
