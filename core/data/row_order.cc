#include "data/row_order.h"

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "base/copy.h"

namespace sparkhvd {
namespace {

// More at once gain nothing more: what they fill leaves the processor's nearer caches.
constexpr size_t kTogether = 4;
constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

// Reading at random places is what takes the time, so it is done once for N columns: their values
// of a row are put side by side in `together`, and picked together.
template <size_t kBytes, size_t N>
void PickTogether(const std::vector<uint32_t>& places, const ColumnRows* columns,
                  std::byte* together) {
  std::byte* to = together;
  for (size_t part = 0; part < columns[0].parts.size(); ++part) {
    const std::byte* from[N];
    for (size_t c = 0; c < N; ++c) from[c] = columns[c].parts[part].data();
    const size_t bytes = columns[0].parts[part].size();
    for (size_t at = 0; at < bytes; at += kBytes) {
      for (size_t c = 0; c < N; ++c) std::memcpy(to + at * N + c * kBytes, from[c] + at, kBytes);
    }
    to += bytes * N;
  }
  std::byte* targets[N];
  for (size_t c = 0; c < N; ++c) targets[c] = columns[c].target.data();
  constexpr size_t kRows = 8;  // of a column before the next one: what was fetched is still near
  const uint32_t* place = places.data();
  size_t row = 0;
  for (; row + kRows <= places.size(); row += kRows) {
    const std::byte* picked[kRows];
    for (size_t r = 0; r < kRows; ++r) picked[r] = together + size_t{place[row + r]} * kBytes * N;
    for (size_t c = 0; c < N; ++c) {
      for (size_t r = 0; r < kRows; ++r) {
        std::memcpy(targets[c] + (row + r) * kBytes, picked[r] + c * kBytes, kBytes);
      }
    }
  }
  for (; row < places.size(); ++row) {
    for (size_t c = 0; c < N; ++c) {
      std::memcpy(targets[c] + row * kBytes, together + (size_t{place[row]} * N + c) * kBytes,
                  kBytes);
    }
  }
}

template <size_t kBytes>
void PickSmall(const std::vector<uint32_t>& places, size_t rows, Span<const ColumnRows> columns) {
  const std::unique_ptr<std::byte[]> together(new std::byte[rows * kBytes * kTogether]);
  size_t done = 0;
  for (; done + kTogether <= columns.size(); done += kTogether) {
    PickTogether<kBytes, kTogether>(places, columns.data() + done, together.get());
  }
  for (; done + 2 <= columns.size(); done += 2) {
    PickTogether<kBytes, 2>(places, columns.data() + done, together.get());
  }
  if (done < columns.size()) {
    PickTogether<kBytes, 1>(places, columns.data() + done, together.get());
  }
}

// Rows that are copied one by one, in the order in which they lie.
void PickLarge(const std::vector<uint32_t>& places, size_t rows, Span<const ColumnRows> columns,
               size_t row_bytes) {
  std::vector<uint32_t> targets(rows, kNowhere);
  for (size_t i = 0; i < places.size(); ++i) targets[places[i]] = static_cast<uint32_t>(i);
  for (const ColumnRows& column : columns) {
    const uint32_t* target = targets.data();
    for (const ConstBytes& part : column.parts) {
      for (size_t at = 0; at < part.size(); at += row_bytes, ++target) {
        if (*target == kNowhere) continue;
        CopyBytes(column.target.data() + *target * row_bytes, part.data() + at, row_bytes);
      }
    }
  }
}

}  // namespace

Result<RowOrder> RowOrder::Make(Span<const int64_t> places, size_t rows) {
  if (rows >= kNowhere) {
    return Status(StatusCode::kInvalidArgument, "rows are put into order up to 2**32 at a time");
  }
  std::vector<uint32_t> checked(places.size());
  size_t outside = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    outside += static_cast<uint64_t>(places[i]) >= rows;
    checked[i] = static_cast<uint32_t>(places[i]);
  }
  if (outside > 0) {
    return Status(StatusCode::kInvalidArgument, std::to_string(outside) + " places are not among " +
                                                    std::to_string(rows) + " rows");
  }
  return RowOrder(std::move(checked), rows);
}

Status RowOrder::Pick(Span<const ColumnRows> columns, size_t row_bytes) const {
  for (const ColumnRows& column : columns) {
    size_t bytes = 0;
    bool whole = row_bytes > 0 && column.parts.size() == columns[0].parts.size();
    for (size_t part = 0; whole && part < column.parts.size(); ++part) {
      const size_t size = column.parts[part].size();
      bytes += size;
      whole = size == columns[0].parts[part].size() && size % row_bytes == 0;
    }
    if (!whole || bytes != rows_ * row_bytes ||
        column.target.size() != places_.size() * row_bytes) {
      return Status(StatusCode::kInvalidArgument,
                    "the parts of every column need " + std::to_string(rows_) + " rows of " +
                        std::to_string(row_bytes) +
                        " bytes, divided alike, and its target room for " +
                        std::to_string(places_.size()));
    }
  }
  switch (row_bytes) {
    case 1:
      PickSmall<1>(places_, rows_, columns);
      break;
    case 2:
      PickSmall<2>(places_, rows_, columns);
      break;
    case 4:
      PickSmall<4>(places_, rows_, columns);
      break;
    case 8:
      PickSmall<8>(places_, rows_, columns);
      break;
    default:
      PickLarge(places_, rows_, columns, row_bytes);
  }
  return Status();
}

}  // namespace sparkhvd
