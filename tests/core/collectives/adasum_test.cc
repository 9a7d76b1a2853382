#include "collectives/adasum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "collectives/ranks.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::ExpectAllOk;
using testing::OnEveryRank;
using testing::Soon;
using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Vector Pair(const Vector& a, const Vector& b) {
  const double ab = Dot(a, b);
  const double aa = Dot(a, a);
  const double bb = Dot(b, b);
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = (aa > 0 ? 1 - ab / (2 * aa) : 1) * a[i] + (bb > 0 ? 1 - ab / (2 * bb) : 1) * b[i];
  }
  return sum;
}

// Applies the definition to whole vectors in one process.
Vector Oracle(std::vector<Vector> vectors) {
  size_t paired = 1;
  while (2 * paired <= vectors.size()) paired *= 2;
  for (size_t extra = paired; extra < vectors.size(); ++extra) {
    vectors[extra - paired] = Pair(vectors[extra - paired], vectors[extra]);
  }
  for (size_t distance = 1; distance < paired; distance *= 2) {
    for (size_t i = 0; i < paired; i += 2 * distance) {
      vectors[i] = Pair(vectors[i], vectors[i + distance]);
    }
  }
  return vectors[0];
}

// One rank's part of a tensor: small integers, which every type represents exactly. Tensor 1 is
// zero on some ranks, and tensor 2 is equal on all.
Vector Content(int rank, size_t tensor, size_t length) {
  std::mt19937 random(static_cast<unsigned>(tensor == 2 ? 7 : 100 * rank) +
                      static_cast<unsigned>(tensor));
  Vector content;
  for (size_t i = 0; i < length; ++i) {
    const int value = static_cast<int>(random() % 9) - 4;
    content.push_back(tensor == 1 && rank % 2 == 1 ? 0 : value);
  }
  return content;
}

class AdasumTest : public ::testing::TestWithParam<int> {};

TEST_P(AdasumTest, SumsEveryTensorLikeTheDefinitionInEveryType) {
  const int size = GetParam();
  // Empty, shorter than the number of ranks, not divisible, and long.
  const std::vector<size_t> lengths{5, 64, 33, 0, 1, 10007};
  std::vector<DType> dtypes = {DType::kBFloat16, DType::kFloat64};
  if (Thorough()) dtypes.insert(dtypes.end(), {DType::kFloat16, DType::kFloat32});
  for (const DType dtype : dtypes) {
    const double precision = dtype == DType::kFloat64   ? 1e-12
                             : dtype == DType::kFloat32 ? 1e-5
                             : dtype == DType::kFloat16 ? 2e-3
                                                        : 1.6e-2;
    std::vector<Mesh> meshes = InProcessMeshes(std::vector<int>(static_cast<size_t>(size), 0));
    std::vector<std::vector<std::byte>> results(static_cast<size_t>(size));
    ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
      size_t total = 0;
      for (const size_t length : lengths) total += length;
      Elements data(dtype, total, static_cast<size_t>(rank % 2));
      size_t next = 0;
      for (size_t tensor = 0; tensor < lengths.size(); ++tensor) {
        for (const double value : Content(rank, tensor, lengths[tensor])) data.Set(next++, value);
      }
      SHVD_TRY(AdasumTree(*mesh.transport, dtype,
                          Span<const size_t>(lengths.data(), lengths.size()), data.data(), Soon()));
      next = 0;
      for (size_t tensor = 0; tensor < lengths.size(); ++tensor) {
        std::vector<Vector> all;
        for (int r = 0; r < size; ++r) all.push_back(Content(r, tensor, lengths[tensor]));
        for (const double expected : Oracle(all)) {
          EXPECT_NEAR(data.Get(next++), expected, precision * std::max(1.0, std::fabs(expected)))
              << Name(dtype) << " tensor " << tensor;
        }
      }
      results[static_cast<size_t>(rank)].assign(data.data(), data.data() + data.size_bytes());
      return Status();
    }));
    for (const auto& result : results) EXPECT_EQ(result, results[0]) << "equal on all ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdasumTest, ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

TEST(Adasum, IsTheSumOfOrthogonalVectorsAndTheMeanOfEqualOnes) {
  std::vector<Mesh> meshes = InProcessMeshes({0, 0});
  ExpectAllOk(OnEveryRank(meshes, [](int rank, Mesh& mesh) {
    std::vector<float> data{rank == 0 ? 3.0f : 0.0f, rank == 1 ? 5.0f : 0.0f, 2.0f, 2.0f};
    const std::vector<size_t> lengths{2, 2};
    SHVD_TRY(AdasumTree(*mesh.transport, DType::kFloat32, Span<const size_t>(lengths.data(), 2),
                        reinterpret_cast<std::byte*>(data.data()), Soon()));
    EXPECT_EQ(data, (std::vector<float>{3, 5, 2, 2}));
    return Status();
  }));
}

// Returns the elements of the adaptive sum of several ranks' tensors.
template <typename T>
std::vector<T> AdasumOf(DType dtype, const std::vector<std::vector<T>>& parts) {
  std::vector<Mesh> meshes = InProcessMeshes(std::vector<int>(parts.size(), 0));
  std::vector<std::vector<T>> results = parts;
  ExpectAllOk(OnEveryRank(meshes, [&](int rank, Mesh& mesh) {
    std::vector<T>& data = results[static_cast<size_t>(rank)];
    const size_t length = data.size();
    return AdasumTree(*mesh.transport, dtype, Span<const size_t>(&length, 1),
                      reinterpret_cast<std::byte*>(data.data()), Soon());
  }));
  return results[0];
}

TEST(Adasum, DependsOnTheDirectionsOnlyHoweverLargeOrSmallFloat64Is) {
  const std::vector<Vector> parts{
      {1, 2, 0, 4, -3}, {2, 1, 0, 1, 5}, {0, 0, 0, 0, 0}, {1, 1, 0, 2, 0}};
  const Vector expected = Oracle(parts);
  for (const double scale : {1e-308, 1e-200, 1e-155, 1e155, 1e200, 1e307}) {
    std::vector<Vector> scaled = parts;
    for (Vector& part : scaled) {
      for (double& value : part) value *= scale;
    }
    const Vector sum = AdasumOf(DType::kFloat64, scaled);
    for (size_t i = 0; i < sum.size(); ++i) {
      EXPECT_NEAR(sum[i] / scale, expected[i], 1e-9) << "scale " << scale << ", element " << i;
    }
  }
}

TEST(Adasum, ScalesThePiecesOfAVectorThatDifferInMagnitude) {
  const std::vector<Vector> parts{{1e-200, 0, 0, 1e200}, {0, 0, 1e-200, 1e200}};
  EXPECT_EQ(AdasumOf(DType::kFloat64, parts), (Vector{0.5e-200, 0, 0.5e-200, 1e200}));
}

// Of the long vector, half the part in the direction of the short one is subtracted.
TEST(Adasum, AddsVectorsWhoseLengthsDifferByMoreThanTheRangeOfTheirType) {
  const Vector sum = AdasumOf<double>(DType::kFloat64, {{1e-200, 0}, {1e200, 1e200}});
  EXPECT_DOUBLE_EQ(sum[0], 0.5e200);
  EXPECT_DOUBLE_EQ(sum[1], 1e200);
  const auto floats = AdasumOf<float>(DType::kFloat32, {{1e20f, 1e20f}, {0, 1e-25f}});
  EXPECT_FLOAT_EQ(floats[0], 1e20f);
  EXPECT_FLOAT_EQ(floats[1], 0.5e20f);
}

TEST(Adasum, OfZerosIsZeroAndOfNoNumberIsNone) {
  EXPECT_EQ(AdasumOf<double>(DType::kFloat64, {{0, 0}, {0, 0}}), (Vector{0, 0}));
  EXPECT_EQ(AdasumOf<double>(DType::kFloat64, {{0, 0}, {0, 1e-320}}), (Vector{0, 1e-320}));
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    for (const double value : AdasumOf<double>(DType::kFloat64, {{bad, 1}, {2, 1}})) {
      EXPECT_TRUE(std::isnan(value)) << value;
    }
  }
}

}  // namespace
}  // namespace sparkhvd
