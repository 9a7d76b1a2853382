// Floating-point arithmetic that does not depend on the calling thread.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace sparkhvd {

// Uses the default modes of floating-point arithmetic in this thread for the lifetime of this
// object: rounding to nearest, and subnormal numbers as they are. Threads of programs may have
// other modes, and threads that they start inherit them. TensorFlow's threads, for example, replace
// subnormal numbers by 0, which would change float16 values below 2^-14. Ranks would then compute
// different results. fesetenv(3) also resets modes that no reduction uses, and takes a microsecond.
class DefaultArithmetic {
 public:
  DefaultArithmetic() : callers_(Get()) {
    if (callers_ != kDefault) Set(kDefault);
  }
  ~DefaultArithmetic() {
    if (callers_ != kDefault) Set(callers_);
  }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  using Modes = unsigned int;
  static constexpr Modes kDefault = 0x1f80;             // no exception is signaled
  static Modes Get() { return _mm_getcsr() & ~0x3fu; }  // without the flags of past exceptions
  static void Set(Modes modes) { _mm_setcsr(modes); }
#elif defined(__aarch64__)
  using Modes = uint64_t;
  static constexpr Modes kDefault = 0;
  static Modes Get() {
    Modes modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void Set(Modes modes) { asm volatile("msr fpcr, %0" : : "r"(modes)); }
#else
  using Modes = int;
  static constexpr Modes kDefault = 0;
  static Modes Get() { return kDefault; }
  static void Set(Modes) {}
#endif

  const Modes callers_;
};

}  // namespace sparkhvd
