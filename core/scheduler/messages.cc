#include "scheduler/messages.h"

#include <cstring>
#include <type_traits>

namespace sparkhvd {
namespace {

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Append(&value, sizeof(value));
  }
  void PutText(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    Append(text.data(), text.size());
  }
  void PutList(const std::vector<int64_t>& list) {
    Put(static_cast<uint32_t>(list.size()));
    Append(list.data(), list.size() * sizeof(int64_t));
  }
  // Writes ids as a bit vector that ends with its last non-zero byte.
  void PutBits(const std::vector<uint32_t>& ids) {
    std::vector<uint8_t> bits(ids.empty() ? 0 : ids.back() / 8 + 1);
    for (const uint32_t id : ids) bits[id / 8] |= static_cast<uint8_t>(1u << (id % 8));
    Put(static_cast<uint32_t>(bits.size()));
    Append(bits.data(), bits.size());
  }
  void PutContent(ConstBytes content) {
    Put(static_cast<uint32_t>(content.size()));
    Append(content.data(), content.size());
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  void Append(const void* data, size_t length) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + length);
  }
  std::vector<std::byte> bytes_;
};

// Reads the bytes. After the first read beyond the end, all values are zero and ok() is false.
class Reader {
 public:
  explicit Reader(ConstBytes bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && position_ == bytes_.size(); }

  template <typename T>
  T Get() {
    T value{};
    Read(&value, sizeof(value));
    return value;
  }
  // Reads a count of items that take at least `least` bytes each.
  size_t GetCount(size_t least) {
    const size_t count = Get<uint32_t>();
    if (count > (bytes_.size() - position_) / least) ok_ = false;
    return ok_ ? count : 0;
  }
  std::string GetText() {
    std::string text(GetCount(1), '\0');
    Read(text.data(), text.size());
    return text;
  }
  std::vector<int64_t> GetList() {
    std::vector<int64_t> list(GetCount(sizeof(int64_t)));
    Read(list.data(), list.size() * sizeof(int64_t));
    return list;
  }
  std::vector<uint32_t> GetBits() {
    std::vector<uint32_t> ids;
    const size_t length = GetCount(1);
    for (size_t index = 0; index < length; ++index) {
      const auto bits = Get<uint8_t>();
      for (unsigned bit = 0; bit < 8; ++bit) {
        if ((bits >> bit & 1u) != 0) ids.push_back(static_cast<uint32_t>(index * 8 + bit));
      }
    }
    return ids;
  }
  ConstBytes GetContent() {
    const size_t length = GetCount(1);
    const ConstBytes content = bytes_.Sub(position_, length);
    position_ += length;
    return content;
  }
  // Reads a value of an enumeration whose last value is `last`.
  template <typename E>
  E GetEnum(E last) {
    const auto value = Get<uint8_t>();
    if (value > static_cast<uint8_t>(last)) ok_ = false;
    return ok_ ? static_cast<E>(value) : E{};
  }

 private:
  void Read(void* target, size_t length) {
    if (!ok_ || length > bytes_.size() - position_) {
      ok_ = false;
      return;
    }
    if (length > 0) std::memcpy(target, bytes_.data() + position_, length);
    position_ += length;
  }
  ConstBytes bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

void Put(Writer& writer, const Request& request) {
  writer.PutText(request.name);
  writer.Put(static_cast<uint8_t>(request.kind));
  writer.Put(static_cast<uint8_t>(request.dtype));
  writer.Put(static_cast<uint8_t>(request.op));
  writer.Put(request.root);
  writer.Put(request.postscale);
  writer.PutList(request.shape);
  writer.PutText(request.group);
  writer.Put(request.group_size);
  writer.Put(static_cast<uint8_t>(request.on_device));
}

Request GetRequest(Reader& reader) {
  Request request;
  request.name = reader.GetText();
  request.kind = reader.GetEnum(kLastOperationKind);
  request.dtype = reader.GetEnum(DType::kFloat64);
  request.op = reader.GetEnum(kLastReduceOp);
  request.root = reader.Get<int32_t>();
  request.postscale = reader.Get<double>();
  request.shape = reader.GetList();
  request.group = reader.GetText();
  request.group_size = reader.Get<uint32_t>();
  request.on_device = reader.GetEnum(uint8_t{1}) != 0;
  return request;
}

void Put(Writer& writer, const Agreement& agreement) {
  writer.PutText(agreement.name);
  writer.Put(static_cast<uint8_t>(agreement.code));
  writer.PutText(agreement.message);
  writer.PutList(agreement.rows);
  writer.Put(static_cast<uint8_t>(agreement.request.has_value()));
  if (agreement.request) Put(writer, *agreement.request);
}

Agreement GetAgreement(Reader& reader) {
  Agreement agreement;
  agreement.name = reader.GetText();
  agreement.code = reader.GetEnum(StatusCode::kInternal);
  agreement.message = reader.GetText();
  agreement.rows = reader.GetList();
  if (reader.GetEnum(uint8_t{1}) != 0) agreement.request = GetRequest(reader);
  return agreement;
}

void Put(Writer& writer, const std::optional<Retuning>& retuning) {
  writer.Put(static_cast<uint8_t>(retuning.has_value()));
  if (!retuning) return;
  const Tunables& tunables = retuning->tunables;
  writer.Put(uint64_t{tunables.fusion_threshold});
  writer.Put(uint64_t{tunables.arena.small_bytes});
  writer.Put(uint64_t{tunables.arena.chunk_bytes});
  writer.Put(static_cast<uint8_t>(tunables.hierarchical));
  writer.Put(static_cast<uint8_t>(retuning->last));
}

std::optional<Retuning> GetRetuning(Reader& reader) {
  if (reader.GetEnum(uint8_t{1}) == 0) return std::nullopt;
  Retuning retuning;
  retuning.tunables.fusion_threshold = reader.Get<uint64_t>();
  retuning.tunables.arena.small_bytes = reader.Get<uint64_t>();
  retuning.tunables.arena.chunk_bytes = reader.Get<uint64_t>();
  retuning.tunables.hierarchical = reader.GetEnum(uint8_t{1}) != 0;
  retuning.last = reader.GetEnum(uint8_t{1}) != 0;
  return retuning;
}

constexpr size_t kLeastRequestBytes = 32;
constexpr size_t kLeastAgreementBytes = 14;

Status Broken(const char* what) {
  return Status(StatusCode::kInternal,
                std::string("a ") + what +
                    " of the negotiation cannot be read; do all ranks run the "
                    "same version of sparkhvd?");
}

}  // namespace

std::vector<std::byte> Encode(const RequestMessage& message) {
  Writer writer;
  writer.PutBits(message.cached);
  writer.Put(static_cast<uint32_t>(message.requests.size()));
  for (const Request& request : message.requests) Put(writer, request);
  Put(writer, message.retuning);
  return writer.Take();
}

std::vector<std::byte> Encode(const ResponseMessage& message) {
  Writer writer;
  writer.PutBits(message.cached);
  writer.Put(static_cast<uint32_t>(message.agreements.size()));
  for (const Agreement& agreement : message.agreements) Put(writer, agreement);
  Put(writer, message.retuning);
  return writer.Take();
}

std::vector<std::byte> Encode(const std::vector<RankedMessage>& messages) {
  Writer writer;
  for (const RankedMessage& message : messages) {
    writer.Put(static_cast<uint32_t>(message.count));
    writer.PutContent(message.content);
  }
  return writer.Take();
}

Result<RequestMessage> DecodeRequestMessage(ConstBytes bytes) {
  Reader reader(bytes);
  RequestMessage message;
  message.cached = reader.GetBits();
  const size_t count = reader.GetCount(kLeastRequestBytes);
  for (size_t i = 0; i < count && reader.ok(); ++i) message.requests.push_back(GetRequest(reader));
  message.retuning = GetRetuning(reader);
  if (!reader.AtEnd()) return Broken("request");
  return message;
}

Result<ResponseMessage> DecodeResponseMessage(ConstBytes bytes) {
  Reader reader(bytes);
  ResponseMessage message;
  message.cached = reader.GetBits();
  const size_t count = reader.GetCount(kLeastAgreementBytes);
  for (size_t i = 0; i < count && reader.ok(); ++i) {
    message.agreements.push_back(GetAgreement(reader));
  }
  message.retuning = GetRetuning(reader);
  if (!reader.AtEnd()) return Broken("response");
  return message;
}

Result<std::vector<RankedMessage>> DecodeRankedMessages(ConstBytes bytes, int begin, int end) {
  Reader reader(bytes);
  std::vector<RankedMessage> messages;
  for (int first = begin; first < end;) {
    const auto count = reader.Get<uint32_t>();
    if (count == 0 || count > static_cast<uint32_t>(end - first)) return Broken("request");
    messages.push_back(RankedMessage{first, static_cast<int>(count), reader.GetContent()});
    first += static_cast<int>(count);
  }
  if (!reader.AtEnd()) return Broken("request");
  return messages;
}

}  // namespace sparkhvd
