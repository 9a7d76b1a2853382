// Decides which ranks may share an arena. The decision is a pure function with the same result on
// all ranks.
#pragma once

#include <vector>

#include "transport/address_record.h"

namespace sparkhvd {

// Returns all ranks in groups. Ranks are ascending inside a group, and groups are in the order of
// their first ranks. A rank that shares memory with no other rank is a group of its own. `records`
// is indexed by rank.
std::vector<std::vector<int>> MemoryGroups(const std::vector<AddressRecord>& records);

}  // namespace sparkhvd
