#include "rendezvous/store_frames.h"

#include <array>

#include "base/wire.h"

namespace sparkhvd {
namespace {

constexpr size_t kAnswerHeadBytes = 4;  // the length of the value that follows
constexpr size_t kMaxAnswerBytes = kAnswerHeadBytes + kMaxValueBytes;

}  // namespace

std::string EncodeStoreRequest(const StoreRequest& request) {
  std::array<std::byte, kStoreHeadBytes> head;
  StoreLittleEndian(static_cast<uint32_t>(request.kind), head.data());
  StoreLittleEndian(static_cast<uint32_t>(request.key.size()), head.data() + 4);
  std::string bytes(reinterpret_cast<const char*>(head.data()), head.size());
  return bytes.append(request.key).append(request.value);
}

Result<StoreRequest> DecodeStoreRequest(ConstBytes bytes) {
  const Status malformed(StatusCode::kInvalidArgument, "malformed rendezvous request");
  if (bytes.size() < kStoreHeadBytes) return malformed;
  StoreRequest request;
  request.kind = static_cast<StoreRequestKind>(LoadLittleEndian<uint32_t>(bytes.data()));
  const size_t key_bytes = LoadLittleEndian<uint32_t>(bytes.data() + 4);
  const size_t rest = bytes.size() - kStoreHeadBytes;
  if (key_bytes > kMaxKeyBytes || key_bytes > rest || rest - key_bytes > kMaxValueBytes) {
    return malformed;
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data() + kStoreHeadBytes);
  request.key.assign(text, key_bytes);
  request.value.assign(text + key_bytes, rest - key_bytes);
  switch (request.kind) {
    case StoreRequestKind::kSet:
    case StoreRequestKind::kWill:
      return request;
    case StoreRequestKind::kGet:
      return request.value.empty() ? Result<StoreRequest>(request) : malformed;
    case StoreRequestKind::kWithdraw:
      return DecodeRequestNumber(AsBytes(request.value)).ok() ? Result<StoreRequest>(request)
                                                              : malformed;
    case StoreRequestKind::kGetAll:
    case StoreRequestKind::kMissing: {
      const auto range = DecodeNumberRange(AsBytes(request.value));
      if (!range.ok()) return malformed;
      const uint32_t numbers = range.value().end - range.value().first;
      const bool many = numbers > kMostNumbersOfMissing;
      return many && request.kind == StoreRequestKind::kMissing ? malformed
                                                                : Result<StoreRequest>(request);
    }
  }
  return malformed;
}

std::string EncodeRequestNumber(uint32_t number) {
  std::array<std::byte, kRequestNumberBytes> bytes;
  StoreLittleEndian(number, bytes.data());
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<uint32_t> DecodeRequestNumber(ConstBytes bytes) {
  if (bytes.size() != kRequestNumberBytes) {
    return Status(StatusCode::kInvalidArgument, "malformed number of a rendezvous request");
  }
  return LoadLittleEndian<uint32_t>(bytes.data());
}

std::string EncodeNumberRange(NumberRange range) {
  std::array<std::byte, 8> bytes;
  StoreLittleEndian(range.first, bytes.data());
  StoreLittleEndian(range.end, bytes.data() + 4);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<NumberRange> DecodeNumberRange(ConstBytes bytes) {
  const Status malformed(StatusCode::kInvalidArgument, "malformed range of rendezvous keys");
  if (bytes.size() != 8) return malformed;
  const NumberRange range = {LoadLittleEndian<uint32_t>(bytes.data()),
                             LoadLittleEndian<uint32_t>(bytes.data() + 4)};
  if (range.first >= range.end) return malformed;
  return range;
}

void AppendToMissing(std::string* answer, uint32_t number) {
  std::array<std::byte, sizeof(number)> bytes;
  StoreLittleEndian(number, bytes.data());
  answer->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<std::vector<uint32_t>> DecodeMissing(ConstBytes bytes) {
  if (bytes.size() % sizeof(uint32_t) != 0) {
    return Status(StatusCode::kInvalidArgument, "malformed rendezvous numbers");
  }
  std::vector<uint32_t> numbers;
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint32_t)) {
    numbers.push_back(LoadLittleEndian<uint32_t>(bytes.data() + at));
  }
  return numbers;
}

bool AppendToAnswer(std::string* answer, const std::string& value) {
  if (answer->size() + kAnswerHeadBytes + value.size() > kMaxAnswerBytes) return false;
  std::array<std::byte, kAnswerHeadBytes> head;
  StoreLittleEndian(static_cast<uint32_t>(value.size()), head.data());
  answer->append(reinterpret_cast<const char*>(head.data()), head.size()).append(value);
  return true;
}

Result<std::vector<std::string>> DecodeAnswer(ConstBytes bytes) {
  const Status malformed(StatusCode::kInvalidArgument, "malformed rendezvous answer");
  std::vector<std::string> values;
  size_t at = 0;
  while (at < bytes.size()) {
    if (bytes.size() - at < kAnswerHeadBytes) return malformed;
    const size_t length = LoadLittleEndian<uint32_t>(bytes.data() + at);
    at += kAnswerHeadBytes;
    if (length > bytes.size() - at) return malformed;
    values.emplace_back(reinterpret_cast<const char*>(bytes.data() + at), length);
    at += length;
  }
  if (values.empty()) return malformed;
  return values;
}

Status CheckStoreSizes(const std::string& key, size_t value_bytes) {
  if (key.size() > kMaxKeyBytes) {
    return Status(StatusCode::kInvalidArgument, "a rendezvous key has at most " +
                                                    std::to_string(kMaxKeyBytes) + " bytes, not " +
                                                    std::to_string(key.size()));
  }
  if (value_bytes > kMaxValueBytes) {
    return Status(StatusCode::kInvalidArgument,
                  "the value of key '" + key + "' has " + std::to_string(value_bytes) +
                      " bytes; a rendezvous value has at most " + std::to_string(kMaxValueBytes) +
                      "; pass larger values through the Store");
  }
  return Status();
}

}  // namespace sparkhvd
