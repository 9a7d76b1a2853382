// Which cases the sanitizers, which slow tests down up to tenfold, are spared.
#pragma once

#include <cstdlib>

namespace sparkhvd {

#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Whether to run the cases that differ in values only, too. A data race depends on the order of the
// steps and not on the values, and the optimised build and AddressSanitizer run all cases;
// ThreadSanitizer does with SPARKHVD_TEST_THOROUGHLY, which `make soak` sets.
inline bool Thorough() {
  return !kThreadSanitizer || std::getenv("SPARKHVD_TEST_THOROUGHLY") != nullptr;
}

// Whether a sanitizer is at work.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace sparkhvd
