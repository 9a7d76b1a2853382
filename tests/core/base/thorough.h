// Selects the cases to run with sanitizers, which slow tests down up to tenfold.
#pragma once

#include <cstdlib>

namespace sparkhvd {

#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Whether to run cases that differ only in values, too. A data race depends on the order of the
// steps, not on values. The optimised build and AddressSanitizer run all cases; ThreadSanitizer
// runs them with SPARKHVD_TEST_THOROUGHLY, which `make soak` sets.
inline bool Thorough() {
  return !kThreadSanitizer || std::getenv("SPARKHVD_TEST_THOROUGHLY") != nullptr;
}

// Whether the build has a sanitizer.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace sparkhvd
