// A concurrent send and receive.
#pragma once

#include <array>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Sends `outgoing` to rank `to` while receiving `incoming` from rank `from`.
inline Status Exchange(Transport& transport, int to, ConstBytes outgoing, int from, Bytes incoming,
                       Deadline deadline) {
  const Result<Ticket> receive = transport.PostReceive(from, incoming);
  SHVD_TRY(receive.status());
  const Result<Ticket> send = transport.PostSend(to, outgoing);
  SHVD_TRY(send.status());
  const std::array<Ticket, 2> tickets{receive.value(), send.value()};
  return transport.Wait(Span<const Ticket>(tickets.data(), tickets.size()), deadline);
}

}  // namespace sparkhvd
