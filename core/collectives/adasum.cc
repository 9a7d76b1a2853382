#include "collectives/adasum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/copy.h"
#include "collectives/exchange.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// The dot products of two vectors a * 2^-exponent_a and b * 2^-exponent_b of one tensor. Without
// the exponents, squares of float64 could overflow or underflow.
struct Products {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  int exponent_a = 0;
  int exponent_b = 0;
};

// Less than any exponent of a number; the exponent of a vector of zeros.
constexpr int kZeroExponent = -10000;

template <typename T>
Bytes BytesOf(T* data, size_t count) {
  return Bytes(reinterpret_cast<std::byte*>(data), count * sizeof(T));
}

// Uses several partial sums, because the additions to a single sum would wait for each other.
template <typename T>
Products MultiplyScaled(const T* a, const T* b, size_t count, double scale_a, double scale_b) {
  constexpr size_t kLanes = 8;
  double ab[kLanes] = {};
  double aa[kLanes] = {};
  double bb[kLanes] = {};
  const auto add = [&](size_t lane, size_t i) {
    const double left = a[i] * scale_a;
    const double right = b[i] * scale_b;
    ab[lane] += left * right;
    aa[lane] += left * left;
    bb[lane] += right * right;
  };
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
  }
  for (size_t i = whole; i < count; ++i) add(i - whole, i);
  Products total;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    total.ab += ab[lane];
    total.aa += aa[lane];
    total.bb += bb[lane];
  }
  return total;
}

// Returns whether no square overflowed, and underflows do not matter, even in sums over all ranks.
inline bool IsSafe(double squares) { return squares > 1e-250 && squares < 1e300; }

// Returns an exponent that scales the largest element to about 1; 0 if an element is infinite or
// NaN.
inline int ExponentOf(const double* values, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return 0;
    largest = std::max(largest, std::fabs(values[i]));
  }
  return largest > 0 ? std::max(std::ilogb(largest), -1023) : kZeroExponent;  // 2^1023 is finite
}

inline double ScaleOf(int exponent) {
  return exponent == kZeroExponent ? 1 : std::ldexp(1.0, -exponent);
}

inline Products Multiply(const float* a, const float* b, size_t count) {
  return MultiplyScaled(a, b, count, 1, 1);  // squares of float32 are in the range of float64
}

inline Products Multiply(const double* a, const double* b, size_t count) {
  const Products plain = MultiplyScaled(a, b, count, 1, 1);
  if (IsSafe(plain.aa) && IsSafe(plain.bb)) return plain;
  const int exponent_a = ExponentOf(a, count);
  const int exponent_b = ExponentOf(b, count);
  Products scaled = MultiplyScaled(a, b, count, ScaleOf(exponent_a), ScaleOf(exponent_b));
  scaled.exponent_a = exponent_a;
  scaled.exponent_b = exponent_b;
  return scaled;
}

inline Products Rescale(const Products& from, int exponent_a, int exponent_b) {
  const int up_a = from.exponent_a - exponent_a;
  const int up_b = from.exponent_b - exponent_b;
  return Products{std::ldexp(from.ab, up_a + up_b), std::ldexp(from.aa, 2 * up_a),
                  std::ldexp(from.bb, 2 * up_b), exponent_a, exponent_b};
}

inline Products Add(const Products& one, const Products& other) {
  const int exponent_a = std::max(one.exponent_a, other.exponent_a);
  const int exponent_b = std::max(one.exponent_b, other.exponent_b);
  Products sum = Rescale(one, exponent_a, exponent_b);
  const Products more = Rescale(other, exponent_a, exponent_b);
  sum.ab += more.ab;
  sum.aa += more.aa;
  sum.bb += more.bb;
  return sum;
}

// The weight 1 - fraction * 2^exponent of a vector.
class Weight {
 public:
  // `exponent` is that of the other vector, minus that of this one.
  Weight(double product, double square, int exponent) {
    if (!(square > 0) || product == 0) return;
    int more = 0;
    fraction_ = std::frexp(product / (2 * square), &more);
    exponent_ = exponent + more;
  }

  // Returns false if the other vector is longer by a factor that T cannot hold.
  template <typename T>
  bool IsInRangeOf() const {
    return exponent_ < std::numeric_limits<T>::max_exponent || !std::isfinite(fraction_);
  }

  template <typename T>
  T In() const {
    return static_cast<T>(1 - std::ldexp(fraction_, exponent_));
  }

  double Times(double element) const {
    return element - std::ldexp(element, exponent_) * fraction_;
  }

 private:
  double fraction_ = 0;
  int exponent_ = 0;
};

// The work of one rank on all tensors at once. Computes in type T.
template <typename T>
class Tree {
 public:
  Tree(Transport& transport, Span<const size_t> lengths, T* data, Deadline deadline)
      : transport_(transport), lengths_(lengths), data_(data), deadline_(deadline) {
    while (2 * paired_ <= transport.size()) paired_ *= 2;
    count_ = std::accumulate(lengths.begin(), lengths.end(), size_t{0});
  }

  Status Run() {
    const int rank = transport_.rank();
    if (rank >= paired_) {
      SHVD_TRY(Send(rank - paired_, Slice{0, count_}).Annotate("adasum fold"));
      return Receive(rank - paired_, data_, Slice{0, count_}).Annotate("adasum unfold");
    }
    const bool has_partner = rank + paired_ < transport_.size();
    if (has_partner) {
      theirs_.resize(count_);
      SHVD_TRY(Receive(rank + paired_, theirs_.data(), Slice{0, count_}).Annotate("adasum fold"));
      const Slice all{0, count_};
      Combine(all, data_, theirs_.data(), MultiplyAll(all, data_, theirs_.data()));
    }
    SHVD_TRY(HalveAndDouble());
    return has_partner ? Send(rank + paired_, Slice{0, count_}).Annotate("adasum unfold")
                       : Status();
  }

 private:
  // Recursive vector halving (distance doubling). In every step, two groups of `distance` ranks,
  // each holding one vector in pieces, become one group that holds the sum of both vectors.
  // Partners exchange halves of their pieces. The weights need the products of whole vectors, so
  // each step sums the partial products of the ranks of both groups. Afterwards, the pieces are
  // gathered in reverse order.
  Status HalveAndDouble() {
    std::vector<Slice> pieces{Slice{0, count_}};
    for (int distance = 1; distance < paired_; distance *= 2) {
      const std::string step = "adasum distance " + std::to_string(distance);
      const Slice piece = pieces.back();
      const bool lower = (transport_.rank() & distance) == 0;
      const Slice first{piece.begin, piece.count / 2};
      const Slice second{piece.begin + first.count, piece.count - first.count};
      const Slice kept = lower ? first : second;
      SHVD_TRY(Halve(distance, kept, lower ? second : first).Annotate(step));
      pieces.push_back(kept);
    }
    for (int distance = paired_ / 2; distance >= 1; distance /= 2) {
      const Slice kept = pieces.back();
      pieces.pop_back();
      const Slice piece = pieces.back();
      const bool lower = (transport_.rank() & distance) == 0;
      const Slice missing = lower ? Slice{piece.begin + kept.count, piece.count - kept.count}
                                  : Slice{piece.begin, piece.count - kept.count};
      const int peer = transport_.rank() ^ distance;
      SHVD_TRY(Exchange(transport_, peer, View(data_, kept), peer, View(data_, missing), deadline_)
                   .Annotate("adasum gather distance " + std::to_string(distance)));
    }
    return Status();
  }

  Status Halve(int distance, Slice kept, Slice sent) {
    const int peer = transport_.rank() ^ distance;
    theirs_.resize(std::max(theirs_.size(), kept.count));
    SHVD_TRY(Exchange(transport_, peer, View(data_, sent), peer,
                      BytesOf(theirs_.data(), kept.count), deadline_));
    const bool lower = (transport_.rank() & distance) == 0;
    const T* own = data_ + kept.begin;
    const T* a = lower ? own : theirs_.data();
    const T* b = lower ? theirs_.data() : own;
    std::vector<Products> products = MultiplyAll(kept, a, b);
    SHVD_TRY(AddUp(distance, products));
    Combine(kept, a, b, products);
    return Status();
  }

  // Sums the products over the 2 * distance ranks of both groups.
  Status AddUp(int distance, std::vector<Products>& products) {
    std::vector<Products> others(products.size());
    for (int step = 1; step <= distance; step *= 2) {
      const int peer = transport_.rank() ^ step;
      SHVD_TRY(Exchange(transport_, peer, BytesOf(products.data(), products.size()), peer,
                        BytesOf(others.data(), others.size()), deadline_));
      for (size_t i = 0; i < products.size(); ++i) products[i] = Add(products[i], others[i]);
    }
    return Status();
  }

  // Calls `visit(tensor, offset, count)` for the part of every tensor that lies in `piece`. The
  // offset is relative to the piece.
  template <typename Visit>
  void ForEachTensor(Slice piece, const Visit& visit) const {
    size_t begin = 0;
    for (size_t tensor = 0; tensor < lengths_.size(); ++tensor) {
      const size_t end = begin + lengths_[tensor];
      const size_t first = std::max(begin, piece.begin);
      const size_t last = std::min(end, piece.begin + piece.count);
      if (first < last) visit(tensor, first - piece.begin, last - first);
      begin = end;
    }
  }

  std::vector<Products> MultiplyAll(Slice piece, const T* a, const T* b) const {
    std::vector<Products> products(lengths_.size());
    ForEachTensor(piece, [&](size_t tensor, size_t offset, size_t count) {
      products[tensor] = Multiply(a + offset, b + offset, count);
    });
    return products;
  }

  // Writes the adaptive sum to this rank's data. `a` and `b` begin at the start of the piece.
  void Combine(Slice piece, const T* a, const T* b, const std::vector<Products>& products) {
    ForEachTensor(piece, [&](size_t tensor, size_t offset, size_t count) {
      const Products& sums = products[tensor];
      const int longer_b = sums.exponent_b - sums.exponent_a;
      const Weight of_a(sums.ab, sums.aa, longer_b);
      const Weight of_b(sums.ab, sums.bb, -longer_b);
      T* target = data_ + piece.begin + offset;
      if (!of_a.template IsInRangeOf<T>() || !of_b.template IsInRangeOf<T>()) {
        for (size_t i = 0; i < count; ++i) {
          target[i] = static_cast<T>(of_a.Times(a[offset + i]) + of_b.Times(b[offset + i]));
        }
        return;
      }
      const T weight_a = of_a.template In<T>();
      const T weight_b = of_b.template In<T>();
      for (size_t i = 0; i < count; ++i) {
        target[i] = weight_a * a[offset + i] + weight_b * b[offset + i];
      }
    });
  }

  static Bytes View(T* data, Slice slice) { return BytesOf(data + slice.begin, slice.count); }

  Status Send(int peer, Slice slice) {
    const Result<Ticket> posted = transport_.PostSend(peer, View(data_, slice));
    SHVD_TRY(posted.status());
    return transport_.Wait(Span<const Ticket>(&posted.value(), 1), deadline_);
  }

  Status Receive(int peer, T* target, Slice slice) {
    const Result<Ticket> posted = transport_.PostReceive(peer, View(target, slice));
    SHVD_TRY(posted.status());
    return transport_.Wait(Span<const Ticket>(&posted.value(), 1), deadline_);
  }

  Transport& transport_;
  const Span<const size_t> lengths_;
  T* data_;
  Deadline deadline_;
  int paired_ = 1;  // the largest power of two up to the number of ranks
  size_t count_ = 0;
  std::vector<T> theirs_;
};

template <typename T>
Status RunTree(Transport& transport, Span<const size_t> lengths, T* data, Deadline deadline) {
  return Tree<T>(transport, lengths, data, deadline).Run();
}

}  // namespace

bool SupportsAdasum(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

Status AdasumTree(Transport& transport, DType dtype, Span<const size_t> lengths, std::byte* data,
                  Deadline deadline) {
  const size_t count = std::accumulate(lengths.begin(), lengths.end(), size_t{0});
  if (transport.size() == 1 || count == 0) return Status();
  if (dtype == DType::kFloat64) {
    std::vector<double> work(count);
    CopyBytes(work.data(), data, count * sizeof(double));
    SHVD_TRY(RunTree(transport, lengths, work.data(), deadline));
    CopyBytes(data, work.data(), count * sizeof(double));
    return Status();
  }
  std::vector<float> work(count);
  ToFloats(dtype, data, work.data(), count);
  SHVD_TRY(RunTree(transport, lengths, work.data(), deadline));
  FromFloats(dtype, work.data(), data, count);
  return Status();
}

}  // namespace sparkhvd
