// The messages between ranks and coordinator in a cycle, and their form on the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/span.h"
#include "base/status.h"
#include "scheduler/request.h"
#include "scheduler/tunables.h"

namespace sparkhvd {

// From a rank: its submissions since its last message.
struct RequestMessage {
  std::vector<uint32_t> cached;           // by the ids of the response cache, ascending
  std::vector<Request> requests;          // everything else
  std::optional<Retuning> retuning = {};  // of rank 0 alone
};

// The coordinator's decision about one operation that was requested in full.
struct Agreement {
  std::string name;
  StatusCode code = StatusCode::kOk;  // otherwise the operation fails with `message`
  std::string message;
  // allgather: rows by rank; alltoall: rows from rank s to rank r at s * size + r; join: the last
  // rank that joined.
  std::vector<int64_t> rows;
  // Where a rank has joined: the request of the others, so that it can take part.
  std::optional<Request> request;
};

// From the coordinator: the operations that all ranks run next, `cached` first, in this order.
struct ResponseMessage {
  std::vector<uint32_t> cached;
  std::vector<Agreement> agreements;
  std::optional<Retuning> retuning = {};  // in force from this cycle on
};

// The length of the longest message that is accepted.
constexpr size_t kMaxMessageBytes = size_t{256} << 20;

std::vector<std::byte> Encode(const RequestMessage& message);
std::vector<std::byte> Encode(const ResponseMessage& message);

// Bytes that are no encoded message fail with kInternal; allocations never exceed what the bytes
// can hold.
Result<RequestMessage> DecodeRequestMessage(ConstBytes bytes);
Result<ResponseMessage> DecodeResponseMessage(ConstBytes bytes);

}  // namespace sparkhvd
