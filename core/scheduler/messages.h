// The messages between ranks and coordinator in a cycle, and their wire format.
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
  std::vector<uint32_t> cached;           // ids in the response cache, ascending
  std::vector<Request> requests;          // all other requests
  std::optional<Retuning> retuning = {};  // set only by rank 0
};

// The coordinator's decision about one operation that was requested in full.
struct Agreement {
  std::string name;
  StatusCode code = StatusCode::kOk;  // other codes: the operation fails with `message`
  std::string message;
  // allgather: rows by rank; join: the last rank to join. The rows of an alltoall only concern
  // pairs of ranks, which exchange them.
  std::vector<int64_t> rows;
  // Set if a rank has joined: the request of the other ranks, so that it can take part.
  std::optional<Request> request;
};

// From the coordinator: the operations that all ranks run next, in this order, `cached` first.
struct ResponseMessage {
  std::vector<uint32_t> cached;
  std::vector<Agreement> agreements;
  std::optional<Retuning> retuning = {};  // in force from this cycle on
};

// The equal messages of consecutive ranks, encoded. Most ranks submit the same operations in the
// same order, so many ranks send only a few different messages.
struct RankedMessage {
  int first = 0;
  int count = 0;
  ConstBytes content;
};

// The longest accepted message.
constexpr size_t kMaxMessageBytes = size_t{256} << 20;

std::vector<std::byte> Encode(const RequestMessage& message);
std::vector<std::byte> Encode(const ResponseMessage& message);
std::vector<std::byte> Encode(const std::vector<RankedMessage>& messages);

// Fails with kInternal unless the bytes are an encoded message. Allocations never exceed what the
// bytes can hold.
Result<RequestMessage> DecodeRequestMessage(ConstBytes bytes);
Result<ResponseMessage> DecodeResponseMessage(ConstBytes bytes);
// The contents are views of `bytes`. Also fails unless the messages come from the ranks `begin` to
// `end` - 1, in this order.
Result<std::vector<RankedMessage>> DecodeRankedMessages(ConstBytes bytes, int begin, int end);

}  // namespace sparkhvd
