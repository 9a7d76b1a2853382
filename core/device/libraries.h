// What collectives in the memory of CUDA devices need to have been found.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "device/cuda.h"
#include "device/nccl.h"

namespace sparkhvd {

struct DeviceLibraries {
  std::shared_ptr<const CudaFunctions> cuda;
  std::shared_ptr<const NcclFunctions> nccl;
};

inline Result<DeviceLibraries> LoadDeviceLibraries(const std::string& cuda_path,
                                                   const std::string& nccl_path) {
  Result<std::shared_ptr<const CudaFunctions>> cuda = LoadCuda(cuda_path);
  SHVD_TRY(cuda.status());
  Result<std::shared_ptr<const NcclFunctions>> nccl = LoadNccl(nccl_path);
  SHVD_TRY(nccl.status());
  return DeviceLibraries{std::move(cuda).value(), std::move(nccl).value()};
}

}  // namespace sparkhvd
