#include "data/row_order.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "base/copy.h"

namespace sparkhvd {
namespace {

// Picking more columns at once gains nothing, because their data does not fit into the processor's
// nearer caches.
constexpr size_t kTogether = 4;
constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

// Calls `take(part, offset, bytes)` for the bytes of all runs, part by part in ascending order.
template <typename Take>
void ForEachRun(const std::vector<RowRun>& runs, const std::vector<ConstBytes>& parts,
                size_t row_bytes, const Take& take) {
  size_t part = 0;
  size_t part_begin = 0;
  for (const RowRun& run : runs) {
    size_t begin = size_t{run.begin} * row_bytes;
    const size_t end = size_t{run.end} * row_bytes;
    while (begin < end) {
      while (begin >= part_begin + parts[part].size()) part_begin += parts[part++].size();
      const size_t stop = std::min(end, part_begin + parts[part].size());
      take(part, begin - part_begin, stop - begin);
      begin = stop;
    }
  }
}

// Reads at random indices dominate the time, so N columns share each read: `together` interleaves
// the N values of every row, and one read fetches all of them.
template <size_t kBytes, size_t N>
void PickTogether(const std::vector<uint32_t>& indices, const std::vector<RowRun>& runs,
                  const ColumnRows* columns, std::byte* together) {
  std::byte* to = together;
  ForEachRun(runs, columns[0].parts, kBytes, [&](size_t part, size_t offset, size_t bytes) {
    const std::byte* from[N];
    for (size_t c = 0; c < N; ++c) from[c] = columns[c].parts[part].data() + offset;
    for (size_t at = 0; at < bytes; at += kBytes) {
      for (size_t c = 0; c < N; ++c) std::memcpy(to + at * N + c * kBytes, from[c] + at, kBytes);
    }
    to += bytes * N;
  });
  std::byte* targets[N];
  for (size_t c = 0; c < N; ++c) targets[c] = columns[c].target.data();
  constexpr size_t kRows = 8;  // rows per column at a time, so that fetched values stay cached
  const uint32_t* index = indices.data();
  size_t row = 0;
  for (; row + kRows <= indices.size(); row += kRows) {
    const std::byte* picked[kRows];
    for (size_t r = 0; r < kRows; ++r) picked[r] = together + size_t{index[row + r]} * kBytes * N;
    for (size_t c = 0; c < N; ++c) {
      for (size_t r = 0; r < kRows; ++r) {
        std::memcpy(targets[c] + (row + r) * kBytes, picked[r] + c * kBytes, kBytes);
      }
    }
  }
  for (; row < indices.size(); ++row) {
    for (size_t c = 0; c < N; ++c) {
      std::memcpy(targets[c] + row * kBytes, together + (size_t{index[row]} * N + c) * kBytes,
                  kBytes);
    }
  }
}

template <size_t kBytes>
void PickSmall(const std::vector<uint32_t>& indices, const std::vector<RowRun>& runs,
               Span<const ColumnRows> columns) {
  const std::unique_ptr<std::byte[]> together(new std::byte[indices.size() * kBytes * kTogether]);
  size_t done = 0;
  for (; done + kTogether <= columns.size(); done += kTogether) {
    PickTogether<kBytes, kTogether>(indices, runs, columns.data() + done, together.get());
  }
  for (; done + 2 <= columns.size(); done += 2) {
    PickTogether<kBytes, 2>(indices, runs, columns.data() + done, together.get());
  }
  if (done < columns.size()) {
    PickTogether<kBytes, 1>(indices, runs, columns.data() + done, together.get());
  }
}

// Copies large rows one by one in storage order.
void PickLarge(const std::vector<uint32_t>& indices, const std::vector<RowRun>& runs,
               Span<const ColumnRows> columns, size_t row_bytes) {
  std::vector<uint32_t> targets(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) targets[indices[i]] = static_cast<uint32_t>(i);
  for (const ColumnRows& column : columns) {
    const uint32_t* target = targets.data();
    ForEachRun(runs, column.parts, row_bytes, [&](size_t part, size_t offset, size_t bytes) {
      const std::byte* from = column.parts[part].data() + offset;
      for (size_t at = 0; at < bytes; at += row_bytes, ++target) {
        CopyBytes(column.target.data() + *target * row_bytes, from + at, row_bytes);
      }
    });
  }
}

// Numbers the requested rows in storage order, and replaces `indices` with these numbers.
std::vector<RowRun> NumberWanted(std::vector<uint32_t>& indices, size_t rows) {
  std::vector<uint32_t> numbers(rows, kNowhere);
  for (const uint32_t index : indices) numbers[index] = 0;
  std::vector<RowRun> runs;
  uint32_t number = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    if (numbers[row] == kNowhere) continue;
    numbers[row] = number++;
    if (runs.empty() || runs.back().end != row) runs.push_back({row, row});
    runs.back().end = row + 1;
  }
  for (uint32_t& index : indices) index = numbers[index];
  return runs;
}

}  // namespace

Result<RowOrder> RowOrder::Make(Span<const int64_t> indices, size_t rows) {
  if (rows >= kNowhere) {
    return Status(StatusCode::kInvalidArgument, "a RowOrder must cover fewer than 2**32 - 1 rows");
  }
  std::vector<uint32_t> checked(indices.size());
  size_t outside = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    outside += static_cast<uint64_t>(indices[i]) >= rows;
    checked[i] = static_cast<uint32_t>(indices[i]);
  }
  if (outside > 0) {
    return Status(StatusCode::kInvalidArgument, "row indices must be at least 0 and below " +
                                                    std::to_string(rows) +
                                                    "; out of range: " + std::to_string(outside));
  }
  std::vector<RowRun> runs = NumberWanted(checked, rows);
  return RowOrder(std::move(checked), std::move(runs), rows);
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
        column.target.size() != indices_.size() * row_bytes) {
      return Status(StatusCode::kInvalidArgument,
                    "the parts of every column must hold " + std::to_string(rows_) + " rows of " +
                        std::to_string(row_bytes) +
                        " bytes, split alike, and its target must have room for " +
                        std::to_string(indices_.size()));
    }
  }
  switch (row_bytes) {
    case 1:
      PickSmall<1>(indices_, runs_, columns);
      break;
    case 2:
      PickSmall<2>(indices_, runs_, columns);
      break;
    case 4:
      PickSmall<4>(indices_, runs_, columns);
      break;
    case 8:
      PickSmall<8>(indices_, runs_, columns);
      break;
    default:
      PickLarge(indices_, runs_, columns, row_bytes);
  }
  return Status();
}

}  // namespace sparkhvd
