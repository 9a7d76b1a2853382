// The functions of the CUDA driver that the core uses, loaded at run time. The build needs no CUDA,
// and without the driver all other features work.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "base/status.h"

// Names of the driver's ABI.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmemPoolHandle_st;

namespace sparkhvd {

using CudaContext = CUctx_st*;
using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;
using CudaPool = CUmemPoolHandle_st*;
using CudaAddress = unsigned long long;  // the driver's own words  NOLINT

// Results of the driver's functions.
constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;

// CUmemPoolProps of CUDA 11.2 and later. Later versions name more of the reserved bytes.
struct CudaPoolProperties {
  int allocation_type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 0;     // no sharing with other processes
  int location_type = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
  void* security_attributes = nullptr;
  std::array<unsigned char, 64> reserved{};
};
static_assert(sizeof(CudaPoolProperties) == 88, "as in cuda.h");

constexpr int kCudaReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, a uint64

struct CudaFunctions {
  int (*init)(unsigned flags);
  int (*get_error_string)(int result, const char** text);
  int (*device_get)(int* device, int ordinal);
  int (*primary_context_retain)(CudaContext* context, int device);
  int (*primary_context_release)(int device);
  int (*context_push)(CudaContext context);
  int (*context_pop)(CudaContext* context);
  int (*priority_range)(int* least, int* greatest);
  int (*stream_create)(CudaStream* stream, unsigned flags, int priority);
  int (*stream_destroy)(CudaStream stream);
  int (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  int (*event_create)(CudaEvent* event, unsigned flags);
  int (*event_destroy)(CudaEvent event);
  int (*event_record)(CudaEvent event, CudaStream stream);
  int (*event_query)(CudaEvent event);
  int (*pool_create)(CudaPool* pool, const CudaPoolProperties* properties);
  int (*pool_destroy)(CudaPool pool);
  int (*pool_set_attribute)(CudaPool pool, int attribute, void* value);
  int (*memory_allocate)(CudaAddress* address, size_t bytes, CudaPool pool, CudaStream stream);
  int (*memory_free)(CudaAddress address, CudaStream stream);
  int (*copy_on_device)(CudaAddress target, CudaAddress source, size_t bytes, CudaStream stream);
  int (*copy_to_device)(CudaAddress target, const void* source, size_t bytes, CudaStream stream);

  // Converts the `result` of `call`. Returns kIo unless it is success.
  Status Check(const char* call, int result) const;
};

// Loads and initializes the driver. Fails with kIo if there is no driver or no device.
Result<std::shared_ptr<const CudaFunctions>> LoadCuda(const std::string& path);

}  // namespace sparkhvd
