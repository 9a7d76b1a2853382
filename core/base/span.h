// A view of contiguous memory that another object owns (std::span is C++20).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace sparkhvd {

template <typename T>
class Span {
 public:
  Span() = default;
  Span(T* data, size_t size) : data_(data), size_(size) {}
  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T>>>
  Span(Span<U> other) : data_(other.data()), size_(other.size()) {}  // NOLINT: mutable to const

  T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](size_t i) const { return data_[i]; }
  Span Sub(size_t offset, size_t count) const { return Span(data_ + offset, count); }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

using Bytes = Span<std::byte>;
using ConstBytes = Span<const std::byte>;

}  // namespace sparkhvd
