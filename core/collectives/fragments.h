// Exchanges of data that lies in several pieces of memory.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Consecutive non-empty pieces of memory.
using Fragments = std::vector<Bytes>;

// Sends `outgoing` to rank `to` while receiving `incoming` from rank `from`.
inline Status ExchangeFragments(Transport& transport, int to, const Fragments& outgoing, int from,
                                const Fragments& incoming, Deadline deadline) {
  std::vector<Ticket> tickets;
  for (const Bytes fragment : incoming) {
    const Result<Ticket> posted = transport.PostReceive(from, fragment);
    SHVD_TRY(posted.status());
    tickets.push_back(posted.value());
  }
  for (const Bytes fragment : outgoing) {
    const Result<Ticket> posted = transport.PostSend(to, fragment);
    SHVD_TRY(posted.status());
    tickets.push_back(posted.value());
  }
  if (tickets.empty()) return Status();
  return transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
}

}  // namespace sparkhvd
