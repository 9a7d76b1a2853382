// The kernels for x86-64 with AVX2 or AVX-512. The loops are the generic ones, compiled for the
// wider registers; only float16 has instructions of its own.
#include <immintrin.h>

#include "collectives/kernel_loops.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

using loops::Float16;

template <typename Op>
[[gnu::target("avx2,f16c")]] void CombineFloat16(std::byte* target, const std::byte* left,
                                                 const std::byte* right, size_t count) {
  constexpr size_t kLanes = 8;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto* a = reinterpret_cast<const __m128i*>(left + 2 * i);
    const auto* b = reinterpret_cast<const __m128i*>(right + 2 * i);
    const __m256 wide_a = _mm256_cvtph_ps(_mm_loadu_si128(a));
    const __m256 wide_b = _mm256_cvtph_ps(_mm_loadu_si128(b));
    const __m256 wide = Op::ApplyVector(wide_a, wide_b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 2 * i),
                     _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  loops::CombineAll<Float16, typename Op::Scalar>(target + 2 * i, left + 2 * i, right + 2 * i,
                                                  count - i);
}

[[gnu::target("avx2,f16c")]] void ScaleFloat16(std::byte* target, const std::byte* source,
                                               size_t count, double factor) {
  constexpr size_t kLanes = 8;
  const __m256 factors = _mm256_set1_ps(static_cast<float>(factor));
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto* from = reinterpret_cast<const __m128i*>(source + 2 * i);
    const __m256 wide = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(from)), factors);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 2 * i),
                     _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  loops::ScaleAll<Float16>(target + 2 * i, source + 2 * i, count - i, factor);
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
// The instructions return their second operand when either is NaN: `b` comes second, and a NaN in
// `a` is put back.
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
};

void UseFloat16Instructions(KernelTable& table) {
  auto& row = table.combine[static_cast<size_t>(DType::kFloat16)];
  row[loops::CombineIndex(ReduceOp::kSum)] = &CombineFloat16<VectorSum>;
  row[loops::CombineIndex(ReduceOp::kMin)] = &CombineFloat16<VectorMin>;
  row[loops::CombineIndex(ReduceOp::kMax)] = &CombineFloat16<VectorMax>;
  row[loops::CombineIndex(ReduceOp::kProduct)] = &CombineFloat16<VectorProduct>;
  table.scale[static_cast<size_t>(DType::kFloat16)] = &ScaleFloat16;
}

KernelTable ChooseKernels() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return GenericKernels();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  KernelTable table = wide ? loops::MakeTable<Avx512>("avx512") : loops::MakeTable<Avx2>("avx2");
  UseFloat16Instructions(table);
  return table;
}

}  // namespace

const KernelTable& FastestKernels() {
  static const KernelTable table = ChooseKernels();
  return table;
}

}  // namespace sparkhvd
