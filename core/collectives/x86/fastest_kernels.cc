// The kernels for x86-64 with AVX2 or AVX-512. They are the generic loops compiled for the wider
// registers; the 16-bit floats have loops of their own.
#include <immintrin.h>

#include "collectives/kernel_loops.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

// Sixteen 16-bit numbers as float32, in the order that suits loading and storing.
struct Widened {
  __m256 first;
  __m256 second;
};

struct Float16Lanes {
  using Scalar = loops::Float16;
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static inline Widened Load(
      const std::byte* data) {
    const auto* halves = reinterpret_cast<const __m128i*>(data);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static inline void Store(std::byte* data,
                                                                            Widened values) {
    auto* halves = reinterpret_cast<__m128i*>(data);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(values.first, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(values.second, _MM_FROUND_TO_NEAREST_INT));
  }
};

// A bfloat16 is the upper half of a float32. Interleaving with zeros makes float32 values, and
// packing restores their order.
struct BFloat16Lanes {
  using Scalar = loops::BFloat16;
  [[gnu::target("avx2"), gnu::always_inline]] static inline Widened Load(const std::byte* data) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, halves)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, halves))};
  }
  [[gnu::target("avx2"), gnu::always_inline]] static inline void Store(std::byte* data,
                                                                       Widened values) {
    const __m256i packed = _mm256_packus_epi32(Round(values.first), Round(values.second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), packed);
  }

 private:
  // Rounds to nearest even and keeps NaN, like loops::NarrowToBFloat16.
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i Round(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i even = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, nan, is_nan);
  }
};

constexpr size_t kLanes = 16;

template <typename Lanes, typename Op>
[[gnu::target("avx2,f16c")]] void CombineHalves(std::byte* target, const std::byte* left,
                                                const std::byte* right, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Widened a = Lanes::Load(left + 2 * i);
    const Widened b = Lanes::Load(right + 2 * i);
    Lanes::Store(target + 2 * i,
                 {Op::ApplyVector(a.first, b.first), Op::ApplyVector(a.second, b.second)});
  }
  loops::CombineAll<typename Lanes::Scalar, typename Op::Scalar>(target + 2 * i, left + 2 * i,
                                                                 right + 2 * i, count - i);
}

template <typename Lanes>
[[gnu::target("avx2,f16c")]] void ScaleHalves(std::byte* target, const std::byte* source,
                                              size_t count, double factor) {
  const __m256 factors = _mm256_set1_ps(static_cast<float>(factor));
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Widened values = Lanes::Load(source + 2 * i);
    Lanes::Store(target + 2 * i,
                 {_mm256_mul_ps(values.first, factors), _mm256_mul_ps(values.second, factors)});
  }
  loops::ScaleAll<typename Lanes::Scalar>(target + 2 * i, source + 2 * i, count - i, factor);
}

struct VectorSum {
  using Scalar = loops::Sum;
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256 ApplyVector(__m256 a, __m256 b) {
    return _mm256_add_ps(a, b);
  }
};
struct VectorProduct {
  using Scalar = loops::Product;
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256 ApplyVector(__m256 a, __m256 b) {
    return _mm256_mul_ps(a, b);
  }
};
// The instructions return their second operand if either is NaN. So `b` comes second, and a NaN in
// `a` is restored afterwards.
struct VectorMin {
  using Scalar = loops::Min;
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256 ApplyVector(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};
struct VectorMax {
  using Scalar = loops::Max;
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256 ApplyVector(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};

template <typename T>
struct Avx2 {
  template <typename Op>
  [[gnu::target("avx2,f16c")]] static void Combine(std::byte* target, const std::byte* left,
                                                   const std::byte* right, size_t count) {
    loops::CombineAll<T, Op>(target, left, right, count);
  }
  [[gnu::target("avx2,f16c")]] static void Scale(std::byte* target, const std::byte* source,
                                                 size_t count, double factor) {
    loops::ScaleAll<T>(target, source, count, factor);
  }
  [[gnu::target("avx2,f16c")]] static void Divide(std::byte* data, size_t count, int divisor) {
    loops::DivideAll<T>(data, count, divisor);
  }
};

template <typename T>
struct Avx512 {
  template <typename Op>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] static void Combine(
      std::byte* target, const std::byte* left, const std::byte* right, size_t count) {
    loops::CombineAll<T, Op>(target, left, right, count);
  }
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] static void Scale(
      std::byte* target, const std::byte* source, size_t count, double factor) {
    loops::ScaleAll<T>(target, source, count, factor);
  }
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] static void Divide(
      std::byte* data, size_t count, int divisor) {
    loops::DivideAll<T>(data, count, divisor);
  }
};

template <typename Lanes>
void UseLanes(KernelTable& table, DType dtype) {
  auto& row = table.combine[static_cast<size_t>(dtype)];
  row[loops::CombineIndex(ReduceOp::kSum)] = &CombineHalves<Lanes, VectorSum>;
  row[loops::CombineIndex(ReduceOp::kMin)] = &CombineHalves<Lanes, VectorMin>;
  row[loops::CombineIndex(ReduceOp::kMax)] = &CombineHalves<Lanes, VectorMax>;
  row[loops::CombineIndex(ReduceOp::kProduct)] = &CombineHalves<Lanes, VectorProduct>;
  table.scale[static_cast<size_t>(dtype)] = &ScaleHalves<Lanes>;
}

KernelTable ChooseKernels() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return GenericKernels();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  KernelTable table = wide ? loops::MakeTable<Avx512>("avx512") : loops::MakeTable<Avx2>("avx2");
  UseLanes<Float16Lanes>(table, DType::kFloat16);
  UseLanes<BFloat16Lanes>(table, DType::kBFloat16);
  return table;
}

}  // namespace

const KernelTable& FastestKernels() {
  static const KernelTable table = ChooseKernels();
  return table;
}

}  // namespace sparkhvd
