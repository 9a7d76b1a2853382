// Negotiation of ranks that share memory. Every rank writes its message to its slot. After one
// step, every rank reads all messages and reaches the same decision, because all Readiness tables
// receive the same messages in the same order. There is no coordinator, and no answer to wait for.
// The data of a small operation may be sent with the message. If all messages are equal, this
// data has already arrived, and the operation needs no further step.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "collectives/slices.h"
#include "scheduler/negotiation.h"

namespace sparkhvd {
namespace {

// The room for a message in the first round of a cycle. Data that is sent with the message follows
// it. A longer message continues in further rounds, which carry no such data.
constexpr size_t kArenaFrameBytes = 1024;

// The head of a frame.
struct Head {
  uint64_t length;  // of the whole message
  int64_t now;      // in nanoseconds; all members use the clock of member 0
};

class ArenaNegotiation final : public Negotiation {
 public:
  ArenaNegotiation(ArenaSteps& steps, size_t cache_capacity, double timeout_s)
      : Negotiation(steps.count(), cache_capacity),
        steps_(steps),
        timeout_s_(timeout_s),
        frame_bytes_(std::min(kArenaFrameBytes, steps.SlotBytes())),
        round_(steps.StartRound()),
        messages_(static_cast<size_t>(steps.count())) {}

  Bytes Announce(const RequestMessage& message) override {
    ids_alone_ = message.requests.empty() && !message.retuning;
    own_ids_ = message.cached;
    own_ = Encode(message);
    part_ = 0;
    round_ = steps_.StartRound();
    std::byte* slot = round_.Slot(steps_.member());
    const Head head{own_.size(), Readiness::Time::clock::now().time_since_epoch().count()};
    std::memcpy(slot, &head, sizeof(head));
    PutPart();
    return Bytes(slot + frame_bytes_, steps_.SlotBytes() - frame_bytes_);
  }

  Status Enter() override {
    steps_.Arrive();
    return Status();
  }

  Result<Outcome> Conclude(Deadline deadline) override {
    while (true) {
      SHVD_TRY(steps_.AwaitAll(deadline).Annotate("waiting for the other ranks' requests"));
      if (part_ == 0 && ids_alone_ && readiness_.empty() && AllAskTheSame()) {
        return Outcome{ResponseMessage{own_ids_, {}}, round_.Behind(frame_bytes_)};
      }
      SHVD_TRY(TakeParts());
      if (!MoreParts()) break;
      ++part_;
      round_ = steps_.StartRound();
      PutPart();
      steps_.Arrive();
    }
    std::optional<Retuning> retuning;
    for (int member = 0; member < steps_.count(); ++member) {
      const std::vector<std::byte>& bytes = messages_[static_cast<size_t>(member)];
      const Result<RequestMessage> message =
          DecodeRequestMessage(ConstBytes(bytes.data(), bytes.size()));
      SHVD_TRY(message.status().Annotate("from rank " + std::to_string(member)));
      SHVD_TRY(readiness_.Add(member, message.value(), cache_, now_));
      if (member == 0) retuning = message.value().retuning;
    }
    return Outcome{Decide(now_, timeout_s_, retuning), std::nullopt};
  }

  bool interruptible() const override { return true; }

 private:
  // Returns the offset in a slot of the current part of a message.
  size_t PartOffset() const { return part_ == 0 ? sizeof(Head) : 0; }

  // Returns the current part of a message of `length` bytes.
  Slice Part(size_t length) const {
    const size_t first = frame_bytes_ - sizeof(Head);
    const size_t begin = part_ == 0 ? 0 : first + (part_ - 1) * steps_.SlotBytes();
    const size_t room = part_ == 0 ? first : steps_.SlotBytes();
    return begin < length ? Slice{begin, std::min(room, length - begin)} : Slice{};
  }

  void PutPart() {
    const Slice part = Part(own_.size());
    if (part.count == 0) return;
    std::memcpy(round_.Slot(steps_.member()) + PartOffset(), own_.data() + part.begin, part.count);
  }

  // Compares the messages without decoding them. In the steady state, all messages are equal.
  bool AllAskTheSame() const {
    if (own_.size() > frame_bytes_ - sizeof(Head)) return false;
    for (int member = 0; member < steps_.count(); ++member) {
      if (member == steps_.member()) continue;
      Head head;
      const std::byte* slot = round_.Slot(member);
      std::memcpy(&head, slot, sizeof(head));
      if (head.length != own_.size()) return false;
      if (std::memcmp(slot + sizeof(head), own_.data(), own_.size()) != 0) return false;
    }
    return true;
  }

  Status TakeParts() {
    for (int member = 0; member < steps_.count(); ++member) {
      std::vector<std::byte>& message = messages_[static_cast<size_t>(member)];
      const std::byte* slot = round_.Slot(member);
      if (part_ == 0) {
        Head head;
        std::memcpy(&head, slot, sizeof(head));
        if (head.length > kMaxMessageBytes) {
          return Status(StatusCode::kInternal, "rank " + std::to_string(member) + " announces " +
                                                   std::to_string(head.length) +
                                                   " bytes of requests, which exceeds the limit");
        }
        message.resize(head.length);
        if (member == 0) now_ = Readiness::Time(Readiness::Time::duration(head.now));
      }
      const Slice part = Part(message.size());
      if (part.count == 0) continue;
      std::memcpy(message.data() + part.begin, slot + PartOffset(), part.count);
    }
    return Status();
  }

  // Returns whether any member's message continues.
  bool MoreParts() const {
    return std::any_of(messages_.begin(), messages_.end(), [this](const auto& message) {
      const Slice part = Part(message.size());
      return part.begin + part.count < message.size() && part.count > 0;
    });
  }

  ArenaSteps& steps_;
  const double timeout_s_;
  const size_t frame_bytes_;

  // The state of the current cycle.
  ArenaSteps::Round round_;
  size_t part_ = 0;
  bool ids_alone_ = false;
  std::vector<uint32_t> own_ids_;
  std::vector<std::byte> own_;
  std::vector<std::vector<std::byte>> messages_;  // indexed by member
  Readiness::Time now_{};
};

}  // namespace

std::unique_ptr<Negotiation> MakeArenaNegotiation(ArenaSteps& steps, size_t cache_capacity,
                                                  double collective_timeout_s) {
  return std::make_unique<ArenaNegotiation>(steps, cache_capacity, collective_timeout_s);
}

}  // namespace sparkhvd
