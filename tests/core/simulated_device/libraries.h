// Loads the simulation like the real libraries, and checks that a test leaves no resources.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "device/libraries.h"
#include "simulated_device/control.h"

namespace sparkhvd {

inline DeviceLibraries SimulatedLibraries() {
  Result<DeviceLibraries> loaded =
      LoadDeviceLibraries(SPARKHVD_SIMULATED_DEVICE, SPARKHVD_SIMULATED_DEVICE);
  EXPECT_TRUE(loaded.ok()) << loaded.status().message();
  return std::move(loaded).value();
}

// A stream of the program on a device.
class ProgramStream {
 public:
  explicit ProgramStream(int ordinal) : ordinal_(ordinal), handle_(simulated::NewStream(ordinal)) {}
  ~ProgramStream() { simulated::DeleteStream(handle_); }
  ProgramStream(const ProgramStream&) = delete;
  ProgramStream& operator=(const ProgramStream&) = delete;

  CudaStream handle() const { return handle_; }
  int ordinal() const { return ordinal_; }
  void Await() const { simulated::AwaitStream(handle_); }

 private:
  const int ordinal_;
  const CudaStream handle_;
};

}  // namespace sparkhvd
