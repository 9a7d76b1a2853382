#include "collectives/adasum.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/copy.h"
#include "collectives/exchange.h"
#include "collectives/kernels.h"
#include "collectives/slices.h"

namespace sparkhvd {
namespace {

// The dot products of two vectors of one tensor.
struct Products {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

template <typename T>
Bytes BytesOf(T* data, size_t count) {
  return Bytes(reinterpret_cast<std::byte*>(data), count * sizeof(T));
}

// Uses several partial sums, because the additions to a single sum would wait for each other.
template <typename T>
Products Multiply(const T* a, const T* b, size_t count) {
  constexpr size_t kLanes = 8;
  Products lanes[kLanes];
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double left = a[i + lane];
      const double right = b[i + lane];
      lanes[lane].ab += left * right;
      lanes[lane].aa += left * left;
      lanes[lane].bb += right * right;
    }
  }
  for (size_t i = whole; i < count; ++i) {
    const double left = a[i];
    const double right = b[i];
    lanes[i - whole].ab += left * right;
    lanes[i - whole].aa += left * left;
    lanes[i - whole].bb += right * right;
  }
  Products total;
  for (const Products& lane : lanes) {
    total.ab += lane.ab;
    total.aa += lane.aa;
    total.bb += lane.bb;
  }
  return total;
}

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

  Status Halve(int distance, Slice kept, Slice given) {
    const int peer = transport_.rank() ^ distance;
    theirs_.resize(std::max(theirs_.size(), kept.count));
    SHVD_TRY(Exchange(transport_, peer, View(data_, given), peer,
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
      for (size_t i = 0; i < products.size(); ++i) {
        products[i].ab += others[i].ab;
        products[i].aa += others[i].aa;
        products[i].bb += others[i].bb;
      }
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
      const auto [ab, aa, bb] = products[tensor];
      const T weight_a = static_cast<T>(aa > 0 ? 1 - ab / (2 * aa) : 1);
      const T weight_b = static_cast<T>(bb > 0 ? 1 - ab / (2 * bb) : 1);
      T* target = data_ + piece.begin + offset;
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
