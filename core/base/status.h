// Failure as a return value: every fallible function of the core returns Status or Result<T>.
#pragma once

#include <cassert>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace sparkhvd {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the caller passed an invalid value
  kMismatch,         // ranks disagree about one operation
  kTimeout,          // a deadline passed
  kAborted,          // Abort was called
  kPeerLost,         // a peer's process or its link has ended
  kIo,               // the operating system reported an error
  kAuthentication,   // the peer does not know the job's token
  kShutDown,         // the engine has been shut down
  kInternal,         // a bug in sparkhvd
};

// Returns the lower-case name that Python uses, such as "peer_lost".
const char* StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // Returns the errno value of the failed system call, or 0.
  int error_number() const { return error_number_; }

  // Returns the same failure with "context: " before its message. OK stays OK.
  Status Annotate(std::string_view context) const {
    return ok() ? *this : Status(code_, std::string(context) + ": " + message_, error_number_);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  int error_number_ = 0;
  std::string message_;
};

// Like Annotate (or a copy, for an empty context), but never throws. When memory is short, it drops
// the context, or replaces the whole message.
Status AnnotateIfPossible(const Status& status, std::string_view context) noexcept;

// Converts the exception `error` into a failure.
Status StatusOf(const std::exception& error) noexcept;

// Returns the Status of `function`, and converts an exception to a failure.
template <typename Function>
Status Guarded(const Function& function) noexcept {
  try {
    return function();
  } catch (const std::exception& error) {
    return StatusOf(error);
  } catch (...) {
    return Status(StatusCode::kInternal, "unknown error");  // short enough to need no allocation
  }
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit by design
    assert(!status_.ok() && "a Result without a value needs a failure");
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace sparkhvd

// Returns from the enclosing function with the failure of `expression` if it failed.
#define SHVD_TRY(expression)                                                                  \
  do {                                                                                        \
    if (::sparkhvd::Status shvd_status = (expression); !shvd_status.ok()) return shvd_status; \
  } while (false)
