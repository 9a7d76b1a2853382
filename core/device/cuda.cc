#include "device/cuda.h"

#include "device/library.h"

namespace sparkhvd {

Status CudaFunctions::Check(const char* call, int result) const {
  if (result == kCudaSuccess) return Status();
  const char* text = nullptr;
  const bool known = get_error_string(result, &text) == kCudaSuccess && text != nullptr;
  return Status(StatusCode::kIo, std::string(call) + " failed with error " +
                                     std::to_string(result) + (known ? ": " : "") +
                                     (known ? text : ""));
}

Result<std::shared_ptr<const CudaFunctions>> LoadCuda(const std::string& path) {
  const Result<Library> opened = Library::Open(path);
  SHVD_TRY(opened.status());
  const Library& library = opened.value();
  CudaFunctions cuda{};
  // cuda.h has mapped the plain names to the names with these suffixes since CUDA 11.
  SHVD_TRY(library.Find("cuInit", cuda.init));
  SHVD_TRY(library.Find("cuGetErrorString", cuda.get_error_string));
  SHVD_TRY(library.Find("cuDeviceGet", cuda.device_get));
  SHVD_TRY(library.Find("cuDevicePrimaryCtxRetain", cuda.primary_context_retain));
  SHVD_TRY(library.Find("cuDevicePrimaryCtxRelease_v2", cuda.primary_context_release));
  SHVD_TRY(library.Find("cuCtxPushCurrent_v2", cuda.context_push));
  SHVD_TRY(library.Find("cuCtxPopCurrent_v2", cuda.context_pop));
  SHVD_TRY(library.Find("cuCtxGetStreamPriorityRange", cuda.priority_range));
  SHVD_TRY(library.Find("cuStreamCreateWithPriority", cuda.stream_create));
  SHVD_TRY(library.Find("cuStreamDestroy_v2", cuda.stream_destroy));
  SHVD_TRY(library.Find("cuStreamWaitEvent", cuda.stream_wait_event));
  SHVD_TRY(library.Find("cuEventCreate", cuda.event_create));
  SHVD_TRY(library.Find("cuEventDestroy_v2", cuda.event_destroy));
  SHVD_TRY(library.Find("cuEventRecord", cuda.event_record));
  SHVD_TRY(library.Find("cuEventQuery", cuda.event_query));
  SHVD_TRY(library.Find("cuMemPoolCreate", cuda.pool_create));
  SHVD_TRY(library.Find("cuMemPoolDestroy", cuda.pool_destroy));
  SHVD_TRY(library.Find("cuMemPoolSetAttribute", cuda.pool_set_attribute));
  SHVD_TRY(library.Find("cuMemAllocFromPoolAsync", cuda.memory_allocate));
  SHVD_TRY(library.Find("cuMemFreeAsync", cuda.memory_free));
  SHVD_TRY(library.Find("cuMemcpyDtoDAsync_v2", cuda.copy_on_device));
  SHVD_TRY(library.Find("cuMemcpyHtoDAsync_v2", cuda.copy_to_device));
  SHVD_TRY(cuda.Check("cuInit", cuda.init(0)));
  return std::shared_ptr<const CudaFunctions>(std::make_shared<CudaFunctions>(cuda));
}

}  // namespace sparkhvd
