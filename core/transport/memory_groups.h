// Which ranks may share an arena: a pure decision that every rank makes alike.
#pragma once

#include <vector>

#include "transport/address_record.h"

namespace sparkhvd {

// All ranks in groups, ascending inside a group and by the first rank. A rank that can share memory
// with nobody is a group of its own. `records` is by rank.
std::vector<std::vector<int>> MemoryGroups(const std::vector<AddressRecord>& records);

}  // namespace sparkhvd
