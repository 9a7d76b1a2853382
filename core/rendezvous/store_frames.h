// The payloads of the frames between TcpStoreClient and TcpStoreServer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/span.h"
#include "base/status.h"
#include "rendezvous/frames.h"
#include "rendezvous/key_value_store.h"

namespace sparkhvd {

constexpr size_t kMaxKeyBytes = 1024;
constexpr size_t kMaxValueBytes = size_t{16} << 20;

// The purpose of the handshake on a rendezvous connection.
inline constexpr char kStorePurpose[] = "rendezvous";

// A will is a Set that the server carries out when the connection ends. A Withdraw ends a will, or
// a Get or GetAll that waits.
enum class StoreRequestKind : uint32_t {
  kSet = 1,
  kGet = 2,
  kWill = 3,
  kGetAll = 4,
  kMissing = 5,
  kWithdraw = 6
};

// The requests of a connection have numbers, because an earlier one may wait while later ones are
// answered. A frame is such a number, followed by a request or its answer.
constexpr size_t kRequestNumberBytes = 4;
std::string EncodeRequestNumber(uint32_t number);
// Fails with kInvalidArgument if `bytes` are not a number.
Result<uint32_t> DecodeRequestNumber(ConstBytes bytes);

// The server answers a Get with the value, a GetAll with the first values, a Missing with numbers,
// and all other requests with nothing.
struct StoreRequest {
  StoreRequestKind kind = StoreRequestKind::kGet;
  std::string key;
  std::string value;
};

// The value of a GetAll or Missing. The key of the request is the prefix. The value of a Withdraw
// is the number of the earlier request.
std::string EncodeNumberRange(NumberRange range);
// Fails with kInvalidArgument for an empty range.
Result<NumberRange> DecodeNumberRange(ConstBytes bytes);

// Limits the time that the server takes for one Missing. The client asks for the rest.
constexpr uint32_t kMostNumbersOfMissing = uint32_t{1} << 16;

void AppendToMissing(std::string* answer, uint32_t number);
// Fails with kInvalidArgument if the bytes end inside a number.
Result<std::vector<uint32_t>> DecodeMissing(ConstBytes bytes);

// Appends `value` to the answer to a GetAll. If the answer would exceed its limit, appends nothing
// and returns false. The client then asks for the rest.
bool AppendToAnswer(std::string* answer, const std::string& value);
// Fails with kInvalidArgument for an answer without values.
Result<std::vector<std::string>> DecodeAnswer(ConstBytes bytes);

// A request is its kind, the length of the key, the key and the value.
constexpr size_t kStoreHeadBytes = 8;
constexpr FrameLimits kStoreLimits = {kRequestNumberBytes + kStoreHeadBytes + kMaxKeyBytes +
                                      kMaxValueBytes};

std::string EncodeStoreRequest(const StoreRequest& request);
// Fails with kInvalidArgument for unknown requests and for lengths above the limits.
Result<StoreRequest> DecodeStoreRequest(ConstBytes bytes);

// Checks both limits on the caller's side.
Status CheckStoreSizes(const std::string& key, size_t value_bytes);

}  // namespace sparkhvd
