// The libraries for collectives in the memory of CUDA devices.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "device/cuda.h"
#include "device/device.h"
#include "device/nccl.h"

namespace sparkhvd {

// Engines of one process get copies of the same object, so that they share devices.
struct DeviceLibraries {
  std::shared_ptr<const CudaFunctions> cuda;
  std::shared_ptr<const NcclFunctions> nccl;
  std::shared_ptr<DeviceTable> devices = std::make_shared<DeviceTable>();

  Result<std::shared_ptr<const Device>> Open(int ordinal) const {
    return devices->Open(cuda, ordinal);
  }
};

inline Result<DeviceLibraries> LoadDeviceLibraries(const std::string& cuda_path,
                                                   const std::string& nccl_path) {
  Result<std::shared_ptr<const CudaFunctions>> cuda = LoadCuda(cuda_path);
  SHVD_TRY(cuda.status());
  Result<std::shared_ptr<const NcclFunctions>> nccl = LoadNccl(nccl_path);
  SHVD_TRY(nccl.status());
  DeviceLibraries libraries;
  libraries.cuda = std::move(cuda).value();
  libraries.nccl = std::move(nccl).value();
  return libraries;
}

}  // namespace sparkhvd
