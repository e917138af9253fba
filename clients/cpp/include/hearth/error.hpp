// Failures: what the daemon answers with, and what goes wrong on this side.
#ifndef HEARTH_ERROR_HPP
#define HEARTH_ERROR_HPP

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace hearth {

/// Counts in tokens, times in milliseconds; `cached_tokens` of the prompt were not computed,
/// `reasoning_tokens` of the completion are reasoning.
struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;
  std::int64_t reasoning_tokens = 0;
  std::int64_t cached_tokens = 0;
  double queue_ms = 0;
  double prefill_ms = 0;
  double decode_ms = 0;
};

/// Family of a failure, by what helps.
enum class Kind {
  request,     ///< The request must change.
  service,     ///< The service could not take or finish it: try again, later or elsewhere.
  connection,  ///< The daemon cannot be reached, or the conversation with it broke.
};

/// A failure as it travels: a stable `code` of PROTOCOL.md or of this client, a `message` of one
/// sentence, the `field` at fault or "". A code that this client does not know is kept.
struct Failure {
  Kind kind = Kind::service;
  std::string code = "internal";
  std::string message;
  std::string field;
  std::optional<double> retry_after_s;  ///< Seconds after which there should be room.
  std::optional<Usage> usage;           ///< What a generation that was accepted had taken.
};

/// Base of what this library throws; `failure` says what happened.
class Error : public std::runtime_error {
 public:
  explicit Error(Failure what) : std::runtime_error(sentence(what)), failure_(std::move(what)) {}

  const Failure& failure() const noexcept { return failure_; }
  const std::string& code() const noexcept { return failure_.code; }
  const std::string& message() const noexcept { return failure_.message; }
  const std::string& field() const noexcept { return failure_.field; }
  std::optional<double> retry_after_s() const noexcept { return failure_.retry_after_s; }

 private:
  static std::string sentence(const Failure& what) {
    return what.message + " (" + what.code + (what.field.empty() ? "" : ", " + what.field) + ")";
  }
  Failure failure_;
};

/// The request must change before it can work.
class RequestRefused : public Error {
  using Error::Error;
};

/// The request was fine, and the service could not take or finish it.
class ServiceFailed : public Error {
  using Error::Error;
};

/// The daemon cannot be reached, or the conversation with it broke.
class ConnectionFailed : public Error {
  using Error::Error;
};

/// Throw the exception of a failure's family.
[[noreturn]] inline void raise(Failure failure) {
  switch (failure.kind) {
    case Kind::request:
      throw RequestRefused(std::move(failure));
    case Kind::connection:
      throw ConnectionFailed(std::move(failure));
    case Kind::service:
      break;
  }
  throw ServiceFailed(std::move(failure));
}

namespace detail {

inline Failure refusal(std::string code, std::string message, std::string field = "") {
  return {Kind::request, std::move(code), std::move(message), std::move(field), {}, {}};
}

inline Failure broken(std::string code, std::string message, std::string field = "") {
  return {Kind::connection, std::move(code), std::move(message), std::move(field), {}, {}};
}

}  // namespace detail
}  // namespace hearth

#endif
