#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/copy.h"
#include "base/deadline.h"
#include "base/dtype.h"
#include "base/io_status.h"
#include "base/random.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "base/wire.h"

namespace sparkhvd {
namespace {

TEST(Status, HasADistinctNameForEveryCode) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names,
            (std::set<std::string>{"ok", "invalid_argument", "mismatch", "timeout", "aborted",
                                   "peer_lost", "io", "authentication", "shut_down", "internal"}));
}

TEST(Status, KeepsItsCodeAndPrefixesTheContext) {
  const Status failure = Status(StatusCode::kTimeout, "too late").Annotate("ring step 3");
  EXPECT_EQ(failure.code(), StatusCode::kTimeout);
  EXPECT_EQ(failure.message(), "ring step 3: too late");
  EXPECT_TRUE(Status().Annotate("anything").ok());
}

TEST(IoStatus, ContainsTheSystemsMessage) {
  EXPECT_EQ(IoStatus("open 'x'", ENOENT).message(), "open 'x': No such file or directory");
}

TEST(DType, ParsesBackEveryName) {
  const std::array<size_t, kDTypeCount> sizes = {1, 1, 1, 2, 2, 4, 8, 2, 2, 4, 8};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(SizeOf(dtype), sizes[i]) << Name(dtype);
    EXPECT_EQ(ParseDType(Name(dtype)), dtype);
  }
  EXPECT_EQ(ParseDType("float8"), std::nullopt);
  EXPECT_EQ(ParseDType(""), std::nullopt);
}

TEST(ReduceOp, ParsesBackEveryName) {
  for (int i = 0; i <= static_cast<int>(ReduceOp::kProduct); ++i) {
    const auto op = static_cast<ReduceOp>(i);
    EXPECT_EQ(ParseReduceOp(Name(op)), op);
  }
  EXPECT_EQ(ParseReduceOp("median"), std::nullopt);
}

TEST(CopyBytes, CopiesTheBytesBetweenAllOffsetsInAPage) {
  constexpr size_t kPage = 4096;
  std::vector<std::byte> source(3 * kPage);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 251);
  for (const size_t from : {0, 1, 64, 2048}) {
    for (const size_t to : {0, 1, 16, 64, 512, 2048, 4032}) {
      for (const size_t bytes : {0, 1, 63, 64, 65, 1000, 8000}) {
        std::vector<std::byte> target(4 * kPage);
        CopyBytes(target.data() + to, source.data() + from, bytes);
        std::vector<std::byte> expected(target.size());
        std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
                    expected.begin() + static_cast<std::ptrdiff_t>(to));
        EXPECT_TRUE(target == expected) << from << " to " << to << ", " << bytes << " bytes";
      }
    }
  }
}

TEST(Deadline, BoundsThePollTimeout) {
  EXPECT_EQ(Deadline::AfterSeconds(0).RemainingMillis(), 0);
  EXPECT_TRUE(Deadline::AfterSeconds(-1).Expired());
  EXPECT_EQ(Deadline::AfterSeconds(std::nan("")).Remaining().count(), 0);
  EXPECT_EQ(Deadline::AfterSeconds(1e12).RemainingMillis(250), 250);
  EXPECT_FALSE(Deadline::AfterSeconds(1e12).Expired());
}

TEST(FillRandom, ReturnsDifferentBytesEachTime) {
  std::array<std::byte, 32> first{};
  std::array<std::byte, 32> second{};
  ASSERT_TRUE(FillRandom(Bytes(first.data(), first.size())).ok());
  ASSERT_TRUE(FillRandom(Bytes(second.data(), second.size())).ok());
  EXPECT_NE(first, second);
}

TEST(UniqueFd, ClosesWhatItOwnsOnce) {
  const auto open_now = [](int fd) { return ::fcntl(fd, F_GETFD) != -1; };
  const int raw = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd first(raw);
    UniqueFd second(std::move(first));
    EXPECT_EQ(second.get(), raw);
    EXPECT_TRUE(open_now(raw));
  }
  EXPECT_FALSE(open_now(raw));
}

TEST(Wire, StoresTheLeastSignificantByteFirst) {
  std::array<std::byte, 8> bytes{};
  StoreLittleEndian(uint64_t{0x1122334455667788}, bytes.data());
  EXPECT_EQ(bytes.front(), std::byte{0x88});
  EXPECT_EQ(bytes.back(), std::byte{0x11});
  EXPECT_EQ(LoadLittleEndian<uint64_t>(bytes.data()), 0x1122334455667788u);
  EXPECT_EQ(LoadLittleEndian<uint16_t>(bytes.data()), 0x7788u);
}

}  // namespace
}  // namespace sparkhvd
