#include "transport/address_record.h"

#include <array>
#include <utility>

#include "base/sha256.h"
#include "base/wire.h"

namespace sparkhvd {
namespace {

constexpr uint32_t kVersion = 4;
constexpr size_t kMostAddresses = 256;
constexpr size_t kMostSettings = 256;
constexpr size_t kMaxTextBytes = 4096;

template <typename Word>
void Append(std::string* out, Word value) {
  std::array<std::byte, sizeof(Word)> bytes;
  StoreLittleEndian(value, bytes.data());
  out->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void AppendText(std::string* out, const std::string& text) {
  Append(out, static_cast<uint32_t>(text.size()));
  *out += text;
}

// Takes fields from the front. After a field that does not fit, all later fields are empty, too.
class Reader {
 public:
  explicit Reader(ConstBytes rest) : rest_(rest) {}

  template <typename Word>
  Word Take() {
    if (!Has(sizeof(Word))) return Word{};
    const Word value = LoadLittleEndian<Word>(rest_.data());
    Skip(sizeof(Word));
    return value;
  }

  std::string TakeText() {
    const auto size = Take<uint32_t>();
    if (size > kMaxTextBytes) good_ = false;
    if (!Has(size)) return "";
    std::string text(reinterpret_cast<const char*>(rest_.data()), size);
    Skip(size);
    return text;
  }

  bool Finished() const { return good_ && rest_.empty(); }

 private:
  bool Has(size_t size) {
    good_ = good_ && rest_.size() >= size;
    return good_;
  }
  void Skip(size_t size) { rest_ = rest_.Sub(size, rest_.size() - size); }

  ConstBytes rest_;
  bool good_ = true;
};

Status Malformed(const std::string& what) {
  return Status(StatusCode::kInvalidArgument,
                "malformed " + what + "; do all ranks run the same version of sparkhvd?");
}

}  // namespace

std::string EncodeAddressRecord(const AddressRecord& record) {
  std::string out;
  Append(&out, kVersion);
  Append(&out, static_cast<uint32_t>(record.tcp.size()));
  for (const HostPort& address : record.tcp) {
    AppendText(&out, address.host);
    Append(&out, address.port);
  }
  AppendText(&out, record.unix_name);
  AppendText(&out, record.host_key);
  Append(&out, static_cast<uint8_t>(record.shared_memory ? 1 : 0));
  Append(&out, static_cast<uint8_t>(record.encrypt ? 1 : 0));
  Append(&out, record.arena_region_bytes);
  Append(&out, record.settings_digest);
  return out;
}

Result<AddressRecord> DecodeAddressRecord(const std::string& bytes) {
  Reader reader(AsBytes(bytes));
  const auto version = reader.Take<uint32_t>();
  AddressRecord record;
  const auto addresses = reader.Take<uint32_t>();
  for (uint32_t i = 0; i < addresses && i < kMostAddresses; ++i) {
    HostPort address;
    address.host = reader.TakeText();
    address.port = reader.Take<uint16_t>();
    record.tcp.push_back(std::move(address));
  }
  record.unix_name = reader.TakeText();
  record.host_key = reader.TakeText();
  const auto shared_memory = reader.Take<uint8_t>();
  record.shared_memory = shared_memory == 1;
  const auto encrypt = reader.Take<uint8_t>();
  record.encrypt = encrypt == 1;
  record.arena_region_bytes = reader.Take<uint64_t>();
  record.settings_digest = reader.Take<uint64_t>();
  if (version != kVersion || addresses > kMostAddresses || shared_memory > 1 || encrypt > 1 ||
      !reader.Finished()) {
    return Malformed("address record");
  }
  return record;
}

std::string EncodeSettings(const CommonSettings& settings) {
  std::string out;
  Append(&out, static_cast<uint32_t>(settings.size()));
  for (const auto& [name, value] : settings) {
    AppendText(&out, name);
    AppendText(&out, value);
  }
  return out;
}

Result<CommonSettings> DecodeSettings(const std::string& bytes) {
  Reader reader(AsBytes(bytes));
  CommonSettings settings;
  const auto count = reader.Take<uint32_t>();
  for (uint32_t i = 0; i < count && i < kMostSettings; ++i) {
    const std::string name = reader.TakeText();
    settings[name] = reader.TakeText();
  }
  if (count != settings.size() || !reader.Finished()) return Malformed("settings");
  return settings;
}

uint64_t DigestOf(const CommonSettings& settings) {
  if (settings.empty()) return 0;
  Sha256 hash;
  hash.Update(AsBytes(EncodeSettings(settings)));
  return LoadLittleEndian<uint64_t>(hash.Finish().data());
}

}  // namespace sparkhvd
