// The ranks that may share an arena: a pure decision, equal on all ranks.
#pragma once

#include <vector>

#include "transport/address_record.h"

namespace sparkhvd {

// All ranks in groups, ascending inside a group and by the first rank. A rank that shares memory
// with no other is a group of its own. `records` is by rank.
std::vector<std::vector<int>> MemoryGroups(const std::vector<AddressRecord>& records);

}  // namespace sparkhvd
