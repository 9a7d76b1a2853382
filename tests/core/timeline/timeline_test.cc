#include "timeline/timeline.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace sparkhvd {
namespace {

class TimelineTest : public ::testing::Test {
 protected:
  TimelineTest() {
    char folder[] = "/tmp/sparkhvd-timeline-XXXXXX";
    folder_ = ::mkdtemp(folder);
    path_ = folder_ + "/trace.json";
  }
  ~TimelineTest() override {
    ::unlink(path_.c_str());
    ::rmdir(folder_.c_str());
  }

  TimelineOptions Options(int rank, const std::string& recording = "job/1") const {
    TimelineOptions options;
    options.path = path_;
    options.recording = recording;
    options.rank = rank;
    return options;
  }

  std::string Content() const {
    std::ostringstream content;
    content << std::ifstream(path_).rdbuf();
    return content.str();
  }

  static size_t Count(const std::string& text, const std::string& part) {
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++count;
    return count;
  }

  std::string folder_;
  std::string path_;
};

void RecordOperation(Timeline& timeline, const std::string& tensor) {
  timeline.Begin(tensor, "allreduce", 400);
  for (const Phase phase : {Phase::kNegotiate, Phase::kWait, Phase::kCollective}) {
    timeline.Enter(tensor, phase);
  }
  timeline.End(tensor, "");
}

TEST_F(TimelineTest, EveryPhaseBeginsAndEnds) {
  Timeline timeline;
  ASSERT_TRUE(timeline.Start(Options(3)).ok());
  RecordOperation(timeline, "grad/\"7\"\n");
  ASSERT_TRUE(timeline.Stop().ok());
  const std::string content = Content();
  EXPECT_EQ(content.substr(0, 2), "[\n");
  EXPECT_EQ(content.substr(content.size() - 3), "\n]\n");
  EXPECT_EQ(Count(content, "\"ph\":\"B\""), 5u) << content;
  EXPECT_EQ(Count(content, "\"ph\":\"E\""), 5u) << content;
  EXPECT_EQ(Count(content, R"("name":"grad/\"7\"\u000a")"), 1u) << content;
  EXPECT_EQ(Count(content, "\"bytes\":400"), 1u);
  EXPECT_EQ(Count(content, "\"pid\":3,"), 13u) << content;
}

TEST_F(TimelineTest, RanksWriteOneFileTogether) {
  constexpr int kRanks = 4;
  constexpr int kOperations = 500;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Timeline timeline;
      EXPECT_TRUE(timeline.Start(Options(rank)).ok());
      for (int i = 0; i < kOperations; ++i) RecordOperation(timeline, "t" + std::to_string(i % 7));
      EXPECT_TRUE(timeline.Stop().ok());
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const std::string content = Content();
  EXPECT_EQ(Count(content, "\"ph\":\"B\""), size_t{5} * kRanks * kOperations);
  EXPECT_EQ(Count(content, "[\n{"), 1u) << "one opening";
  EXPECT_EQ(Count(content, "\n]\n"), 1u) << "one end, written by the last rank to stop";
  EXPECT_EQ(content.find("\n]\n"), content.size() - 3);
}

TEST_F(TimelineTest, ANewRecordingReplacesTheFileButALateRankAppendsToIt) {
  Timeline first;
  Timeline late;
  ASSERT_TRUE(first.Start(Options(0, "job/1")).ok());
  RecordOperation(first, "old");
  ASSERT_TRUE(first.Stop().ok());
  ASSERT_TRUE(late.Start(Options(1, "job/1")).ok());
  RecordOperation(late, "late");
  ASSERT_TRUE(late.Stop().ok());
  EXPECT_EQ(Count(Content(), "\"name\":\"old\""), 1u);
  EXPECT_EQ(Count(Content(), "\"name\":\"late\""), 1u);
  EXPECT_EQ(Count(Content(), "\n]"), 1u);
  ASSERT_TRUE(first.Start(Options(0, "job/2")).ok());
  ASSERT_TRUE(first.Stop().ok());
  EXPECT_EQ(Count(Content(), "\"name\":\"old\""), 0u);
}

TEST_F(TimelineTest, OperationsSubmittedBeforeTheStartLeaveNoUnmatchedEvents) {
  Timeline timeline;
  EXPECT_FALSE(timeline.on());
  ASSERT_TRUE(timeline.Start(Options(0)).ok());
  timeline.Enter("earlier", Phase::kCollective);
  timeline.End("earlier", "");
  timeline.MarkCycle();
  ASSERT_TRUE(timeline.Stop().ok());
  EXPECT_EQ(Count(Content(), "\"ph\":\"E\""), 0u);
  EXPECT_EQ(Count(Content(), "\"ph\":\"i\""), 0u) << "cycles were not requested";
}

TEST_F(TimelineTest, FailuresAreRecordedWithTheirOperationAndCyclesOnRequest) {
  Timeline timeline;
  TimelineOptions options = Options(0);
  options.mark_cycles = true;
  ASSERT_TRUE(timeline.Start(options).ok());
  timeline.Begin("x", "broadcast", 0);
  timeline.MarkCycle();
  timeline.End("x", "lost rank 1");
  ASSERT_TRUE(timeline.Stop().ok());
  EXPECT_EQ(Count(Content(), R"("failure":"lost rank 1")"), 1u);
  EXPECT_EQ(Count(Content(), "\"ph\":\"i\""), 1u);
}

TEST_F(TimelineTest, RejectsASecondStartAndAPathInAMissingFolder) {
  Timeline timeline;
  ASSERT_TRUE(timeline.Start(Options(0)).ok());
  const Status again = timeline.Start(Options(0));
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(again.message().find("stop it"), std::string::npos) << again.message();
  ASSERT_TRUE(timeline.Stop().ok());
  ASSERT_TRUE(timeline.Stop().ok());
  TimelineOptions missing_folder = Options(0);
  missing_folder.path = folder_ + "/missing/trace.json";
  const Status failed = timeline.Start(missing_folder);
  EXPECT_EQ(failed.code(), StatusCode::kIo);
  EXPECT_NE(failed.message().find(missing_folder.path), std::string::npos) << failed.message();
  EXPECT_FALSE(timeline.on());
}

TEST_F(TimelineTest, AWriterThatStopsWhileItJoinsFailsTheStartOfOthers) {
  const UniqueFd stopped(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  struct flock turn{};
  turn.l_type = F_WRLCK;
  turn.l_whence = SEEK_SET;
  turn.l_start = off_t{1} << 40;
  turn.l_len = 1;
  ASSERT_EQ(::fcntl(stopped.get(), F_OFD_SETLK, &turn), 0);
  Timeline timeline;
  EXPECT_EQ(timeline.Start(Options(0)).message(),
            "lock the timeline " + path_ + ": Connection timed out");
}

TEST_F(TimelineTest, AFullDiskFailsTheStart) {
  Timeline timeline;
  TimelineOptions full = Options(0);
  full.path = "/dev/full";
  EXPECT_EQ(timeline.Start(full).code(), StatusCode::kIo);
}

TEST_F(TimelineTest, ARankThatCannotWriteDoesNotDamageTheFileOfTheOthers) {
  Timeline first;
  Timeline other;
  ASSERT_TRUE(first.Start(Options(0)).ok());
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  rlimit full = unlimited;
  full.rlim_cur = Content().size();
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  EXPECT_EQ(other.Start(Options(1)).code(), StatusCode::kIo);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  std::signal(SIGXFSZ, handler);
  ASSERT_TRUE(first.Stop().ok());
  EXPECT_EQ(Count(Content(), "\n]\n"), 1u) << "the last rank to stop closes the array";
}

}  // namespace
}  // namespace sparkhvd
