// The kernels for 64-bit Arm. All of these processors have vectors of 128 bits (NEON), so compilers
// vectorize the generic loops; only float16 has loops of its own, with the instructions that
// convert it.
#include <arm_neon.h>

#include "collectives/kernel_loops.h"
#include "collectives/kernels.h"

namespace sparkhvd {
namespace {

// Eight float16 numbers as float32.
struct Widened {
  float32x4_t first;
  float32x4_t second;
};

constexpr size_t kLanes = 8;

Widened Load(const std::byte* data) {
  uint16x8_t bits;
  std::memcpy(&bits, data, sizeof(bits));
  const float16x8_t halves = vreinterpretq_f16_u16(bits);
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

void Store(std::byte* data, Widened values) {
  const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(values.first), values.second);
  const uint16x8_t bits = vreinterpretq_u16_f16(halves);
  std::memcpy(data, &bits, sizeof(bits));
}

template <typename T>
struct Halves {
  template <typename Op>
  static void Combine(std::byte* target, const std::byte* left, const std::byte* right,
                      size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Widened a = Load(left + 2 * i);
      const Widened b = Load(right + 2 * i);
      Store(target + 2 * i, {Op::Apply(a.first, b.first), Op::Apply(a.second, b.second)});
    }
    loops::CombineAll<T, Op>(target + 2 * i, left + 2 * i, right + 2 * i, count - i);
  }
  static void Scale(std::byte* target, const std::byte* source, size_t count, double factor) {
    const auto multiplier = static_cast<float>(factor);
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Widened values = Load(source + 2 * i);
      Store(target + 2 * i, {values.first * multiplier, values.second * multiplier});
    }
    loops::ScaleAll<T>(target + 2 * i, source + 2 * i, count - i, factor);
  }
};

KernelTable MakeKernels() {
  KernelTable table = GenericKernels();
  table.name = "neon";
  loops::FillRow<Halves, loops::Float16>(table, DType::kFloat16);
  return table;
}

}  // namespace

const KernelTable& FastestKernels() {
  static const KernelTable table = MakeKernels();
  return table;
}

}  // namespace sparkhvd
