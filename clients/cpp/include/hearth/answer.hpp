// Answers by types; fields that are unknown here are ignored, and stay in `raw`.
#ifndef HEARTH_ANSWER_HPP
#define HEARTH_ANSWER_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"
#include "value.hpp"

namespace hearth {

/// Limits of the daemon; sizes in bytes, lengths in tokens, times in seconds. Those of images are
/// 0 where the model sees none.
struct Limits {
  std::int64_t frame_bytes = 0;
  std::int64_t frames = 0;
  std::int64_t requests_per_client = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t total_tokens = 0;
  std::int64_t queued_requests = 0;
  std::int64_t queued_tokens = 0;
  double lease_s = 0;
  std::int64_t images = 0;
  std::int64_t image_bytes = 0;
  std::int64_t request_image_bytes = 0;
  std::int64_t image_tokens = 0;
};

/// Base of an answer: `raw` is its message as it came, in msgpack.
struct Answer {
  std::string raw;
};

/// The answer to `hello`. Another `epoch` means that the daemon was restarted.
struct Welcome : Answer {
  std::int64_t proto = 0;
  std::string server;
  Limits limits;
  std::vector<std::string> features;
  std::string model;
  std::string epoch;
  std::vector<std::string> adapters;
  std::string tool_format;
};

/// The request is in the queue; `request` is its id in the daemon's logs and traces.
struct Accepted : Answer {
  std::int64_t prompt_tokens = 0;
  std::string request;
};

/// A token's natural log probability and the most likely alternatives. The bytes come with the
/// feature `token_bytes`.
struct TokenLogprob {
  double logprob = 0;
  std::vector<std::pair<std::int64_t, double>> top;
  Bytes token_bytes;
  std::vector<Bytes> top_bytes;
};

/// More of call `index`: `id` and `name` in its first piece, then JSON text.
struct CallPiece {
  std::int64_t index = 0;
  std::string id;
  std::string name;
  std::string arguments;
};

/// More of a reply; `choice` tells several replies apart. `ended` is in seconds of CLOCK_MONOTONIC.
struct Delta : Answer {
  std::int64_t seq = 0;
  std::string text;
  std::vector<std::int64_t> tokens;
  std::vector<TokenLogprob> logprobs;
  std::optional<double> ended;
  std::string reasoning;
  std::vector<CallPiece> tool_calls;
  std::int64_t choice = 0;
};

/// A reply's rounds of speculation; `accept_length` is the tokens a round.
struct Speculation {
  std::int64_t rounds = 0;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  double accept_length = 0;
};

/// A request's images and videos; `sizes` are width and height in pixels as the model saw them.
struct ImageUsage {
  std::int64_t count = 0;
  std::int64_t tokens = 0;
  std::int64_t cached = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
  double decode_ms = 0;
  double resize_ms = 0;
  double engine_ms = 0;
};

/// End of one of several replies.
struct Ended {
  std::string reason;
  std::int64_t completion_tokens = 0;
  std::string stop;
};

/// The end of a generation. `reason` is stop, length, cancelled, tool_calls, or a newer word.
struct Done : Answer {
  std::string reason;
  Usage usage;
  std::optional<Speculation> speculation;
  std::optional<ImageUsage> images;
  std::string stop;
  std::vector<Ended> choices;
};

/// What the daemon serves and does; `fields` has all of it by the names of PROTOCOL.md.
struct StatusReport : Answer {
  std::string server;
  std::string model;
  std::string state;
  double uptime_s = 0;
  std::int64_t clients = 0;
  std::int64_t running = 0;
  std::int64_t queued = 0;
  std::int64_t queued_tokens = 0;
  std::int64_t places = 0;
  std::vector<std::string> adapters;
  Value::Object fields;
};

namespace detail {

[[noreturn]] inline void unreadable(std::string_view name) {
  raise(broken("protocol_violation", "an answer of the server has no readable " + std::string(name),
               std::string(name)));
}

inline void read(const Value& value, std::string& into, std::string_view name) {
  const auto* text = value.get_if<std::string>();
  if (!text) unreadable(name);
  into = *text;
}
inline void read(const Value& value, std::int64_t& into, std::string_view name) {
  const auto* integer = value.get_if<std::int64_t>();
  if (!integer) unreadable(name);
  into = *integer;
}
inline void read(const Value& value, double& into, std::string_view name) {
  if (const auto* real = value.get_if<double>()) {
    into = *real;
  } else if (const auto* integer = value.get_if<std::int64_t>()) {
    into = static_cast<double>(*integer);
  } else {
    unreadable(name);
  }
}
inline void read(const Value& value, bool& into, std::string_view name) {
  const auto* flag = value.get_if<bool>();
  if (!flag) unreadable(name);
  into = *flag;
}
inline void read(const Value& value, Bytes& into, std::string_view name) {
  const auto* bytes = value.get_if<Bytes>();
  if (!bytes) unreadable(name);
  into = *bytes;
}
template <typename A, typename B>
void read(const Value& value, std::pair<A, B>& into, std::string_view name) {
  const auto* items = value.get_if<Value::Array>();
  if (!items || items->size() != 2) unreadable(name);
  read((*items)[0], into.first, name);
  read((*items)[1], into.second, name);
}

/// Reader of a map's fields; throws ConnectionFailed (protocol_violation) for a wrong type.
class FieldReader {
 public:
  FieldReader(const Value& map, std::string_view name) : map_(map) {
    if (!map.get_if<Value::Object>()) unreadable(name);
  }

  template <typename T>
  void required(std::string_view name, T& into) const {
    const Value* value = map_.find(name);
    if (!value) unreadable(name);
    take(*value, into, name);
  }
  template <typename T>
  void maybe(std::string_view name, T& into) const {
    const Value* value = map_.find(name);
    if (value && !value->is_null()) take(*value, into, name);
  }

  const Value::Object& all() const { return *map_.get_if<Value::Object>(); }

 private:
  template <typename T>
  static void take(const Value& value, T& into, std::string_view name) {
    if constexpr (std::is_aggregate_v<T>) {
      read(FieldReader(value, name), into);
    } else {
      read(value, into, name);
    }
  }
  template <typename T>
  static void take(const Value& value, std::optional<T>& into, std::string_view name) {
    take(value, into.emplace(), name);
  }
  template <typename T>
  static void take(const Value& value, std::vector<T>& into, std::string_view name) {
    if constexpr (std::is_same_v<std::vector<T>, Bytes>) {
      read(value, into, name);
    } else {
      const auto* items = value.get_if<Value::Array>();
      if (!items) unreadable(name);
      for (const auto& item : *items) take(item, into.emplace_back(), name);
    }
  }

  const Value& map_;
};

inline void read(const FieldReader& map, Usage& into) {
  map.required("prompt_tokens", into.prompt_tokens);
  map.required("completion_tokens", into.completion_tokens);
  map.maybe("reasoning_tokens", into.reasoning_tokens);
  map.maybe("cached_tokens", into.cached_tokens);
  map.maybe("queue_ms", into.queue_ms);
  map.maybe("prefill_ms", into.prefill_ms);
  map.maybe("decode_ms", into.decode_ms);
}
inline void read(const FieldReader& map, Limits& into) {
  map.required("frame_bytes", into.frame_bytes);
  map.required("frames", into.frames);
  map.required("requests_per_client", into.requests_per_client);
  map.required("prompt_tokens", into.prompt_tokens);
  map.required("total_tokens", into.total_tokens);
  map.required("queued_requests", into.queued_requests);
  map.required("queued_tokens", into.queued_tokens);
  map.required("lease_s", into.lease_s);
  map.maybe("images", into.images);
  map.maybe("image_bytes", into.image_bytes);
  map.maybe("request_image_bytes", into.request_image_bytes);
  map.maybe("image_tokens", into.image_tokens);
}
inline void read(const FieldReader& map, Welcome& into) {
  map.required("proto", into.proto);
  map.required("server", into.server);
  map.required("limits", into.limits);
  map.maybe("features", into.features);
  map.maybe("model", into.model);
  map.maybe("epoch", into.epoch);
  map.maybe("adapters", into.adapters);
  map.maybe("tool_format", into.tool_format);
}
inline void read(const FieldReader& map, Accepted& into) {
  map.required("prompt_tokens", into.prompt_tokens);
  map.maybe("request", into.request);
}
inline void read(const FieldReader& map, TokenLogprob& into) {
  map.required("logprob", into.logprob);
  map.maybe("top", into.top);
  map.maybe("token_bytes", into.token_bytes);
  map.maybe("top_bytes", into.top_bytes);
}
inline void read(const FieldReader& map, CallPiece& into) {
  map.required("index", into.index);
  map.maybe("id", into.id);
  map.maybe("name", into.name);
  map.maybe("arguments", into.arguments);
}
inline void read(const FieldReader& map, Delta& into) {
  map.required("seq", into.seq);
  map.required("text", into.text);
  map.maybe("tokens", into.tokens);
  map.maybe("logprobs", into.logprobs);
  map.maybe("ended", into.ended);
  map.maybe("reasoning", into.reasoning);
  map.maybe("tool_calls", into.tool_calls);
  map.maybe("choice", into.choice);
}
inline void read(const FieldReader& map, Speculation& into) {
  map.required("rounds", into.rounds);
  map.required("drafted", into.drafted);
  map.required("accepted", into.accepted);
  map.required("accept_length", into.accept_length);
}
inline void read(const FieldReader& map, ImageUsage& into) {
  map.required("count", into.count);
  map.required("tokens", into.tokens);
  map.maybe("cached", into.cached);
  map.maybe("sizes", into.sizes);
  map.maybe("decode_ms", into.decode_ms);
  map.maybe("resize_ms", into.resize_ms);
  map.maybe("engine_ms", into.engine_ms);
}
inline void read(const FieldReader& map, Ended& into) {
  map.required("reason", into.reason);
  map.required("completion_tokens", into.completion_tokens);
  map.maybe("stop", into.stop);
}
inline void read(const FieldReader& map, Done& into) {
  map.required("reason", into.reason);
  map.required("usage", into.usage);
  map.maybe("speculation", into.speculation);
  map.maybe("images", into.images);
  map.maybe("stop", into.stop);
  map.maybe("choices", into.choices);
}
inline void read(const FieldReader& map, StatusReport& into) {
  map.required("server", into.server);
  map.required("model", into.model);
  map.required("state", into.state);
  map.required("uptime_s", into.uptime_s);
  map.required("clients", into.clients);
  map.required("running", into.running);
  map.required("queued", into.queued);
  map.required("queued_tokens", into.queued_tokens);
  map.maybe("places", into.places);
  map.maybe("adapters", into.adapters);
  into.fields = map.all();
}

/// Codes of the daemon by which a request has to change; others are the service's.
inline bool is_of_the_request(std::string_view code) {
  for (const std::string_view one :
       {"invalid_value", "unsupported_option", "grammar_invalid", "prompt_empty", "prompt_too_long",
        "capacity_exceeded", "adapter_unknown", "cache_full", "image_invalid", "image_too_large",
        "image_timeout", "bad_message", "message_too_large", "unknown_message", "duplicate_id",
        "repeated_failure"}) {
    if (one == code) return true;
  }
  return false;
}

inline void read(const FieldReader& map, Failure& into) {
  map.required("code", into.code);
  map.required("message", into.message);
  map.maybe("field", into.field);
  map.maybe("retry_after_s", into.retry_after_s);
  map.maybe("usage", into.usage);
  // The server no longer knows this connection: it was restarted, or it ended the session.
  if (into.code == "hello_required") into.code = "connection_lost";
  if (into.code == "connection_lost" || into.code == "not_allowed" ||
      into.code == "unsupported_protocol") {
    into.kind = Kind::connection;
  } else if (is_of_the_request(into.code)) {
    into.kind = Kind::request;
  }
}

}  // namespace detail

/// The answer of type `T` in a decoded message; throws ConnectionFailed (protocol_violation).
template <typename T>
T answer(const Value& message) {
  T into;
  read(detail::FieldReader(message, "map"), into);
  return into;
}

}  // namespace hearth

#endif
