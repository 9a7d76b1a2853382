// Fuzzes every decoder of data from the wire.
#include "base/fuzz.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/failure_note.h"
#include "rendezvous/dial.h"
#include "rendezvous/frames.h"
#include "rendezvous/handshake.h"
#include "rendezvous/reception.h"
#include "rendezvous/socket.h"
#include "rendezvous/store_frames.h"
#include "rendezvous/tcp_store_client.h"
#include "rendezvous/tcp_store_server.h"
#include "scheduler/messages.h"
#include "transport/address_record.h"
#include "transport/link_stream.h"
#include "transport/message_header.h"
#include "transport/socket_transport.h"

namespace sparkhvd {
namespace {

ConstBytes View(const FuzzInput& input) { return ConstBytes(input.data(), input.size()); }

std::vector<FuzzInput> RequestSeeds() {
  RequestMessage message;
  std::vector<FuzzInput> seeds = {Encode(message)};
  message.cached = {0, 3, 64, 1000};
  for (int i = 0; i < 20; ++i) {
    Request request;
    request.name = "gradient/" + std::to_string(i);
    request.kind = static_cast<OperationKind>(i % 4);
    request.shape = std::vector<int64_t>(static_cast<size_t>(i % 5), i);
    message.requests.push_back(request);
    seeds.push_back(Encode(message));
  }
  message.retuning = Retuning{};
  seeds.push_back(Encode(message));
  return seeds;
}

std::vector<FuzzInput> ResponseSeeds() {
  ResponseMessage message;
  std::vector<FuzzInput> seeds = {Encode(message)};
  message.cached = {1, 2, 500};
  for (int i = 0; i < 20; ++i) {
    Agreement agreement;
    agreement.name = "gradient/" + std::to_string(i);
    agreement.code = static_cast<StatusCode>(i % 9);
    agreement.message = std::string(static_cast<size_t>(i), 'x');
    agreement.rows = std::vector<int64_t>(static_cast<size_t>(i % 4), i);
    if (i % 2 == 0) agreement.request = Request{};
    message.agreements.push_back(agreement);
    seeds.push_back(Encode(message));
  }
  message.retuning = Retuning{};
  seeds.push_back(Encode(message));
  return seeds;
}

// An accepted message must encode to the same bytes. Otherwise two ranks could understand one
// message differently.
template <typename Message>
void ExpectStable(const Message& message, Result<Message> (*decode)(ConstBytes)) {
  const FuzzInput first = Encode(message);
  const Result<Message> again = decode(View(first));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_TRUE(Encode(again.value()) == first);
}

TEST(Fuzz, RankedMessages) {
  const FuzzInput one = Encode(RequestMessage{});
  const FuzzInput other = Encode(RequestMessage{{1, 5}, {}, {}});
  const std::vector<FuzzInput> seeds = {
      Encode(std::vector<RankedMessage>{{4, 5, View(one)}}),
      Encode(std::vector<RankedMessage>{{4, 1, View(one)}, {5, 3, View(other)}, {8, 1, View(one)}}),
  };
  for (const FuzzInput& seed : seeds) ASSERT_TRUE(DecodeRankedMessages(View(seed), 4, 9).ok());
  Fuzz(seeds, [](const FuzzInput& input) {
    const auto messages = DecodeRankedMessages(View(input), 4, 9);
    if (!messages.ok()) return;
    int next = 4;
    for (const RankedMessage& message : messages.value()) {
      EXPECT_EQ(message.first, next);
      EXPECT_GT(message.count, 0);
      next += message.count;
    }
    EXPECT_EQ(next, 9);
    EXPECT_TRUE(Encode(messages.value()) == input);
  });
}

TEST(Fuzz, RequestMessages) {
  Fuzz(RequestSeeds(), [](const FuzzInput& input) {
    const auto message = DecodeRequestMessage(View(input));
    if (message.ok()) ExpectStable(message.value(), DecodeRequestMessage);
  });
}

TEST(Fuzz, ResponseMessages) {
  Fuzz(ResponseSeeds(), [](const FuzzInput& input) {
    const auto message = DecodeResponseMessage(View(input));
    if (message.ok()) ExpectStable(message.value(), DecodeResponseMessage);
  });
}

TEST(Fuzz, AddressRecords) {
  AddressRecord record;
  record.settings_digest = DigestOf({{"capacity", "5"}});
  record.tcp = {{"127.0.0.1", 4242}, {"::1", 1}};
  record.unix_name = "sparkhvd-0123456789abcdef";
  record.host_key = "host";
  Fuzz({ToInput(AsBytes(EncodeAddressRecord(record))),
        ToInput(AsBytes(EncodeAddressRecord(AddressRecord{})))},
       [](const FuzzInput& input) {
         const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
         const auto decoded = DecodeAddressRecord(text);
         if (!decoded.ok()) return;
         EXPECT_EQ(EncodeAddressRecord(decoded.value()), text);
       });
}

TEST(Fuzz, Settings) {
  const CommonSettings settings{{"capacity", "5"}, {"size", "the default"}};
  Fuzz({ToInput(AsBytes(EncodeSettings(settings))), ToInput(AsBytes(EncodeSettings({})))},
       [](const FuzzInput& input) {
         const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
         const auto decoded = DecodeSettings(text);
         if (!decoded.ok()) return;
         EXPECT_EQ(decoded.value().empty(), DigestOf(decoded.value()) == 0);
       });
}

TEST(Fuzz, MessageHeaders) {
  std::vector<FuzzInput> seeds;
  for (const MessageHeader& header : {MessageHeader{false, 65536, StatusCode::kAborted},
                                      MessageHeader{true, 100, StatusCode::kPeerLost}}) {
    const auto bytes = EncodeMessageHeader(header);
    seeds.push_back(ToInput(ConstBytes(bytes.data(), bytes.size())));
  }
  Fuzz(seeds, [](const FuzzInput& input) {
    const auto header = DecodeMessageHeader(View(input));
    if (header.ok() && header.value().farewell) {
      EXPECT_LE(header.value().length, kMaxFarewellBytes);
    }
  });
}

TEST(Fuzz, FailureNotes) {
  std::vector<FuzzInput> seeds;
  for (const StatusCode code : {StatusCode::kPeerLost, StatusCode::kInternal}) {
    seeds.push_back(ToInput(AsBytes(EncodeFailure(Status(code, "rank 3: its process has ended")))));
  }
  Fuzz(seeds, [](const FuzzInput& input) {
    const std::string note(reinterpret_cast<const char*>(input.data()), input.size());
    const std::optional<Status> failure = DecodeFailure(note);
    if (!failure) return;
    EXPECT_FALSE(failure->ok());
    EXPECT_EQ(EncodeFailure(*failure), note);
  });
}

TEST(Fuzz, StoreRequests) {
  std::vector<FuzzInput> seeds;
  for (const auto kind : {StoreRequestKind::kSet, StoreRequestKind::kWill}) {
    seeds.push_back(ToInput(AsBytes(EncodeStoreRequest({kind, "a key", "a value"}))));
  }
  const std::string range = EncodeNumberRange({1, 3});
  seeds.push_back(
      ToInput(AsBytes(EncodeStoreRequest({StoreRequestKind::kGetAll, "a prefix", range}))));
  seeds.push_back(
      ToInput(AsBytes(EncodeStoreRequest({StoreRequestKind::kMissing, "a prefix", range}))));
  seeds.push_back(ToInput(
      AsBytes(EncodeStoreRequest({StoreRequestKind::kWithdraw, "", EncodeRequestNumber(7)}))));
  Fuzz(seeds, [](const FuzzInput& input) {
    const auto request = DecodeStoreRequest(View(input));
    if (!request.ok()) return;
    EXPECT_LE(request.value().key.size(), kMaxKeyBytes);
    EXPECT_LE(request.value().value.size(), kMaxValueBytes);
    EXPECT_TRUE(ToInput(AsBytes(EncodeStoreRequest(request.value()))) == input);
  });
}

TEST(Fuzz, StoreAnswers) {
  std::string answer;
  for (const char* value : {"a value", "", "another"}) AppendToAnswer(&answer, value);
  Fuzz({ToInput(AsBytes(answer))}, [](const FuzzInput& input) {
    const auto values = DecodeAnswer(View(input));
    if (!values.ok()) return;
    std::string again;
    for (const std::string& value : values.value()) EXPECT_TRUE(AppendToAnswer(&again, value));
    EXPECT_TRUE(ToInput(AsBytes(again)) == input);
  });
}

TEST(Fuzz, HandshakesAdmitNobody) {
  FuzzInput hello(kHelloBytes);
  auto start = DialerHandshake("secret", "purpose", 7).Start();
  const FuzzInput good = ToInput(ConstBytes(start.value().data(), start.value().size()));
  Fuzz({good, hello}, [](const FuzzInput& input) {
    AcceptorHandshake handshake("secret", "purpose");
    ConstBytes rest = View(input);
    while (rest.size() >= handshake.wanted()) {
      const size_t wanted = handshake.wanted();
      const auto answer = handshake.Consume(rest.Sub(0, wanted));
      if (!answer.ok()) break;
      rest = rest.Sub(wanted, rest.size() - wanted);
      ASSERT_FALSE(handshake.done());
    }
    DialerHandshake own("secret", "purpose", 1);
    ASSERT_TRUE(own.Start().ok());
    Welcome welcome{};
    std::memcpy(welcome.data(), input.data(), std::min(input.size(), welcome.size()));
    (void)own.Prove(welcome);
    Digest answer{};
    std::memcpy(answer.data(), input.data(), std::min(input.size(), answer.size()));
    EXPECT_EQ(own.Check(answer).code(), StatusCode::kAuthentication);
  });
}

// A member of the job sends nonsense, in a frame or instead of one. Its connection may end, but the
// server continues.
TEST(Fuzz, TheStoreServerOutlivesAMemberThatSendsNonsense) {
  auto server = TcpStoreServer::Start({"127.0.0.1", 0}, "secret");
  ASSERT_TRUE(server.ok());
  DialOptions options;
  options.addresses = {server.value()->address()};
  options.token = "secret";
  options.purpose = kStorePurpose;
  std::vector<FuzzInput> seeds;
  for (const StoreRequest& request :
       {StoreRequest{StoreRequestKind::kSet, "key", "value"},
        StoreRequest{StoreRequestKind::kGet, "key", ""},
        StoreRequest{StoreRequestKind::kGetAll, "key", EncodeNumberRange({0, 2})},
        StoreRequest{StoreRequestKind::kMissing, "key", EncodeNumberRange({0, 2})},
        StoreRequest{StoreRequestKind::kWill, "key", "value"},
        StoreRequest{StoreRequestKind::kWithdraw, "", EncodeRequestNumber(1)}}) {
    seeds.push_back(ToInput(AsBytes(EncodeRequestNumber(1) + EncodeStoreRequest(request))));
  }
  Fuzz(seeds, [&](const FuzzInput& input) {
    const Deadline deadline = Deadline::AfterSeconds(20);
    SessionKeys keys;
    auto unframed = Dial(options, deadline);
    ASSERT_TRUE(unframed.ok()) << unframed.status().message();
    (void)WriteSome(unframed.value().get(), View(input));
    auto dialed = Dial(options, deadline, &keys);
    ASSERT_TRUE(dialed.ok()) << dialed.status().message();
    auto framed =
        FrameConnection::Make(std::move(dialed).value(), keys, Side::kDialer, kStoreLimits);
    ASSERT_TRUE(framed.ok()) << framed.status().message();
    (void)framed.value().Send(View(input), deadline);
  });
  auto client = TcpStoreClient::Connect(options.addresses, "secret", Deadline::AfterSeconds(20));
  ASSERT_TRUE(client.ok()) << client.status().message();
  EXPECT_TRUE(client.value()->Set("still", "there", Deadline::AfterSeconds(20)).ok());
}

// A store server that admits all members of the job and sends the configured bytes as every answer.
class NonsenseServer {
 public:
  NonsenseServer() : thread_([this] { Run(); }) {}
  ~NonsenseServer() {
    over_ = true;
    thread_.join();
  }

  HostPort address() const { return address_; }
  // Call it before the client connects.
  void AnswerWith(const FuzzInput& answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    answer_ = answer;
  }

 private:
  static UniqueFd Listen(HostPort& address) {
    auto listener = ListenTcp({"127.0.0.1", 0});
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    address = LocalAddress(listener.value().get()).value();
    return std::move(listener).value();
  }

  void Run() {
    while (!over_) {
      std::vector<pollfd> fds;
      reception_.AppendPollFds(fds);
      ::poll(fds.data(), fds.size(), reception_.TimeoutMillis(20));
      for (Admitted& admitted : reception_.Serve()) Answer(std::move(admitted));
    }
  }

  void Answer(Admitted admitted) {
    auto connection =
        FrameConnection::Make(std::move(admitted.fd), admitted.keys, Side::kAcceptor, kStoreLimits);
    ASSERT_TRUE(connection.ok()) << connection.status().message();
    // The request must be read first: unread data would reset the connection and could lose the
    // answer.
    if (!connection.value().Receive(Deadline::AfterSeconds(20)).ok()) return;
    const int fd = connection.value().fd();
    FuzzInput answer;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      answer = answer_;
    }
    (void)WriteExactly(fd, View(answer), Deadline::AfterSeconds(20));
    ::shutdown(fd, SHUT_WR);
    (void)AwaitEvents(fd, POLLIN, Deadline::AfterSeconds(20));
  }

  HostPort address_;
  Reception reception_{[this] {
                         std::vector<UniqueFd> listeners;
                         listeners.push_back(Listen(address_));
                         return listeners;
                       }(),
                       "secret", kStorePurpose};
  std::mutex mutex_;
  FuzzInput answer_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

TEST(Fuzz, OnlyFramesOfTheServerAnswerAClient) {
  FuzzInput answer = {std::byte(5), std::byte(0), std::byte(0), std::byte(0)};
  for (const char letter : std::string("value")) answer.push_back(std::byte(letter));
  FuzzInput tagged = answer;
  tagged.resize(answer.size() + sizeof(Digest));
  NonsenseServer server;
  Fuzz({answer, tagged, FuzzInput(4)}, [&](const FuzzInput& input) {
    server.AnswerWith(input);
    auto client = TcpStoreClient::Connect({server.address()}, "secret", Deadline::AfterSeconds(20));
    ASSERT_TRUE(client.ok()) << client.status().message();
    const auto value = client.value()->Get("key", Deadline::AfterSeconds(20));
    EXPECT_TRUE(value.status().code() == StatusCode::kAuthentication ||
                value.status().code() == StatusCode::kPeerLost)
        << value.status().message();
  });
}

// A peer sends nonsense, or an invalid farewell. The result is an error, and reads stay within the
// received bytes.
TEST(Fuzz, MessagesOfPeers) {
  std::vector<FuzzInput> seeds;
  for (const MessageHeader& header :
       {MessageHeader{false, 16, StatusCode::kOk}, MessageHeader{true, 16, StatusCode::kAborted},
        MessageHeader{true, kMaxFarewellBytes, StatusCode::kPeerLost}}) {
    const auto bytes = EncodeMessageHeader(header);
    seeds.push_back(ToInput(ConstBytes(bytes.data(), bytes.size())));
    seeds.back().resize(seeds.back().size() + 16, std::byte('x'));
  }
  Fuzz(seeds, [&](const FuzzInput& input) {
    std::array<int, 2> pair{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
    UniqueFd network(pair[1]);
    std::vector<PeerSocket> peers(2);
    peers[1].stream = UniqueFd(pair[0]);
    auto transport = MakeSocketTransport(0, std::move(peers));
    ASSERT_TRUE(transport.ok()) << transport.status().message();
    (void)WriteSome(network.get(), View(input));
    ::shutdown(network.get(), SHUT_WR);
    std::array<std::byte, 16> data{};
    auto ticket = transport.value()->PostReceive(1, Bytes(data.data(), data.size()));
    const std::array<Ticket, 1> tickets = {ticket.ok() ? ticket.value() : 0};
    const Status status =
        ticket.ok() ? transport.value()->Wait(Span<const Ticket>(tickets.data(), tickets.size()),
                                              Deadline::AfterSeconds(20))
                    : ticket.status();
    // A farewell may report a timeout, but the wait here must not end with one.
    EXPECT_TRUE(status.code() != StatusCode::kTimeout ||
                status.message().find("rank 1 aborted") != std::string::npos)
        << status.message();
    EXPECT_LE(status.message().size(), kMaxFarewellBytes + 200);
    const MessageHeader fitting{false, 16, StatusCode::kOk};
    const auto good = EncodeMessageHeader(fitting);
    const bool whole = input.size() >= good.size() + data.size() &&
                       std::memcmp(input.data(), good.data(), good.size()) == 0;
    EXPECT_EQ(status.ok(), whole) << status.message();
  });
}

TEST(Fuzz, EncryptedLinksLetNothingThrough) {
  FuzzInput record(4 + 100 + 16);
  record[0] = std::byte(100);
  Fuzz({record, FuzzInput(40)}, [](const FuzzInput& input) {
    std::array<int, 2> pair{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()), 0);
    UniqueFd network(pair[1]);
    auto stream =
        LinkStream::Make(UniqueFd(pair[0]), LinkKeys{}, std::make_shared<RecordBuffers>());
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    (void)WriteSome(network.get(), View(input));
    ::shutdown(network.get(), SHUT_WR);
    std::array<std::byte, 50> data{};
    auto count = stream.value().Read(Bytes(data.data(), data.size()));
    // A part of a record moves nothing; the next call notices the end.
    if (count.ok() && count.value() == 0) {
      count = stream.value().Read(Bytes(data.data(), data.size()));
    }
    EXPECT_FALSE(count.ok());
  });
}

}  // namespace
}  // namespace sparkhvd
