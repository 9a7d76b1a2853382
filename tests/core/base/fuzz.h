// Feeds decoders with bytes that no encoder wrote.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "base/span.h"

namespace sparkhvd {

using FuzzInput = std::vector<std::byte>;

inline FuzzInput ToInput(ConstBytes bytes) { return FuzzInput(bytes.begin(), bytes.end()); }

// The time for which each decoder is fed: a moment, or SPARKHVD_FUZZ_SECONDS for a long run.
inline std::chrono::duration<double> FuzzTime() {
  const char* text = std::getenv("SPARKHVD_FUZZ_SECONDS");
  return std::chrono::duration<double>(text == nullptr ? 0.1 : std::atof(text));
}

// Applies one of the changes that find most mistakes: flipped bits, extreme lengths, and pieces
// that are omitted, repeated or taken from another message.
inline void Mutate(FuzzInput& input, const FuzzInput& other, std::mt19937_64& random) {
  const auto below = [&random](size_t limit) { return limit == 0 ? 0 : random() % limit; };
  const auto at = [&](size_t position) {
    return input.begin() + static_cast<std::ptrdiff_t>(position);
  };
  switch (random() % 7) {
    case 0:
      if (!input.empty()) input[below(input.size())] ^= std::byte(1 << below(8));
      return;
    case 1:
      if (!input.empty()) input[below(input.size())] = std::byte(random());
      return;
    case 2:
      input.resize(below(input.size() + 1));
      return;
    case 3: {
      if (input.size() < 4) return;
      constexpr uint32_t kExtremes[] = {0,      1,          0x7f,       0xff,
                                        0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
      const uint32_t value = kExtremes[below(8)];
      std::memcpy(input.data() + below(input.size() - 3), &value, sizeof(value));
      return;
    }
    case 4: {
      const size_t from = below(input.size());
      const size_t length = below(std::min<size_t>(input.size() - from, 64) + 1);
      const FuzzInput piece(at(from), at(from + length));
      input.insert(at(below(input.size() + 1)), piece.begin(), piece.end());
      return;
    }
    case 5: {
      const size_t from = below(input.size());
      input.erase(at(from), at(from + below(input.size() - from + 1)));
      return;
    }
    default: {
      const size_t from = below(other.size());
      input.resize(below(input.size() + 1));
      input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
    }
  }
}

// Calls `decode` with mutated and with random inputs until the time is up. The sanitizers and the
// caller check that nothing crashes, hangs or takes unreasonable memory.
inline void Fuzz(const std::vector<FuzzInput>& seeds,
                 const std::function<void(const FuzzInput&)>& decode) {
  std::random_device device;
  const uint64_t seed = device();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + FuzzTime();
  constexpr size_t kLongest = size_t{1} << 16;
  uint64_t rounds = 0;
  do {
    FuzzInput input = seeds[random() % seeds.size()];
    for (uint64_t change = random() % 8; change > 0; --change) {
      Mutate(input, seeds[random() % seeds.size()], random);
    }
    if (input.size() > kLongest) input.resize(kLongest);
    decode(input);
    ++rounds;
  } while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure());
  ::testing::Test::RecordProperty("rounds", static_cast<int>(rounds));
}

}  // namespace sparkhvd
