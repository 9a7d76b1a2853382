// Rows of columns in another order: how the readers shuffle what they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// One column: where its rows lie, part after part, and room for those that are picked.
struct ColumnRows {
  std::vector<ConstBytes> parts;
  Bytes target;
};

// The rows `begin` to `end` (exclusive).
struct RowRun {
  uint32_t begin;
  uint32_t end;
};

// Which rows come, and in which order.
class RowOrder {
 public:
  // `places` are those of the rows to deliver, in this order, among `rows` rows; each at most once.
  static Result<RowOrder> Make(Span<const int64_t> places, size_t rows);

  // Puts rows of `row_bytes` into the columns' targets in this order. Four columns of up to 8 bytes
  // take less time together than one by one. May be called by several threads at once.
  Status Pick(Span<const ColumnRows> columns, size_t row_bytes) const;

 private:
  RowOrder(std::vector<uint32_t> places, std::vector<RowRun> runs, size_t rows)
      : places_(std::move(places)), runs_(std::move(runs)), rows_(rows) {}

  std::vector<uint32_t> places_;  // among the rows of `runs_` alone
  std::vector<RowRun> runs_;      // the rows to deliver, in the order in which they lie
  size_t rows_;
};

}  // namespace sparkhvd
