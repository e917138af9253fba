// Typed requests from their fields on the wire, and typed answers as such fields.
#ifndef HEARTH_TESTS_FORMS_HPP
#define HEARTH_TESTS_FORMS_HPP

#include <hearth/hearth.hpp>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace forms {

using hearth::Value;
using Object = Value::Object;
/// The picture that fields of a part mean.
using Picture = std::function<hearth::Image(const Value&)>;

template <typename T>
const T& as(const Value& value) {
  const T* held = value.get_if<T>();
  if (!held) hearth::raise({hearth::Kind::request, "invalid_value", "a field has another type", "", {}, {}});
  return *held;
}
inline std::int64_t integer(const Value& value) { return as<std::int64_t>(value); }
inline double number(const Value& value) {
  const auto* whole = value.get_if<std::int64_t>();
  return whole ? static_cast<double>(*whole) : as<double>(value);
}
inline const std::string& text(const Value& value) { return as<std::string>(value); }
inline const Value::Array& list(const Value& value) { return as<Value::Array>(value); }
inline std::string text_or(const Value& map, const char* name) {
  const Value* found = map.find(name);
  return found ? text(*found) : "";
}
inline std::int64_t integer_or(const Value& map, const char* name) {
  const Value* found = map.find(name);
  return found ? integer(*found) : 0;
}

// --- requests ---

/// The picture that a part tells of, whose bytes lie elsewhere.
inline hearth::Image picture(const Value& part, hearth::Bytes bytes) {
  if (!part.find("encoding")) return hearth::Image::encoded(std::move(bytes));
  return hearth::Image::pixels(std::move(bytes), text_or(part, "encoding"),
                               integer_or(part, "width"), integer_or(part, "height"),
                               integer_or(part, "step"));
}

inline hearth::Part part(const Value& value, const Picture& picture) {
  const std::string type = text_or(value, "type");
  if (type == "text") return text_or(value, "text");
  if (type == "image") return picture(value);
  hearth::Video video;
  for (const auto& one : list(*value.find("frames"))) {
    video.frames.emplace_back(picture(one), number(*one.find("time_s")));
  }
  return video;
}

inline hearth::Message message(const Value& value, const Picture& picture) {
  hearth::Message turn;
  turn.role = text_or(value, "role");
  turn.reasoning = text_or(value, "reasoning");
  turn.tool_call_id = text_or(value, "tool_call_id");
  turn.name = text_or(value, "name");
  if (const Value* content = value.find("content")) {
    if (const auto* parts = content->get_if<Value::Array>()) {
      std::vector<hearth::Part> read;
      for (const auto& one : *parts) read.push_back(part(one, picture));
      turn.content = std::move(read);
    } else if (!content->is_null()) {
      turn.content = text(*content);
    }
  }
  if (const Value* calls = value.find("tool_calls")) {
    for (const auto& one : list(*calls)) {
      const Value* arguments = one.find("arguments");
      turn.tool_calls.push_back({text_or(one, "id"), text_or(one, "name"),
                                 arguments ? as<Object>(*arguments) : Object()});
    }
  }
  return turn;
}

inline hearth::Tool tool(const Value& value) {
  hearth::Tool made;
  made.name = text_or(value, "name");
  made.description = text_or(value, "description");
  if (const Value* parameters = value.find("parameters")) made.parameters = *parameters;
  if (const Value* strict = value.find("strict")) made.strict = as<bool>(*strict);
  return made;
}

inline hearth::ResponseFormat form(const Value& value) {
  const std::string type = text_or(value, "type");
  if (type == "json_schema") return hearth::JsonSchema{*value.find("schema")};
  if (type == "regex") return hearth::Regex{text_or(value, "regex")};
  if (type == "lark") return hearth::Lark{text_or(value, "grammar")};
  return hearth::JsonObject{};
}

/// Set a field that requests with a conversation have; false for another.
inline bool set_chat(hearth::ChatOptions& into, const std::string& name, const Value& value,
                     const Picture& picture) {
  if (name == "messages") {
    for (const auto& one : list(value)) into.messages.push_back(message(one, picture));
  } else if (name == "tools") {
    for (const auto& one : list(value)) into.tools.push_back(tool(one));
  } else if (name == "tool_choice") {
    if (value.get_if<Object>()) {
      into.tool_choice = hearth::NamedTool{text_or(value, "name")};
    } else {
      into.tool_choice = text(value);
    }
  } else if (name == "parallel_tool_calls") {
    into.parallel_tool_calls = as<bool>(value);
  } else if (name == "template") {
    into.chat_template = as<Object>(value);
  } else {
    return false;
  }
  return true;
}

inline hearth::GenerateRequest generate(const Value& fields, const Picture& picture) {
  using G = hearth::GenerateRequest;
  static const std::map<std::string, std::optional<std::int64_t> G::*> integers{
      {"max_tokens", &G::max_tokens}, {"top_k", &G::top_k},
      {"seed", &G::seed},             {"logprobs", &G::logprobs},
      {"priority", &G::priority},     {"reasoning_budget", &G::reasoning_budget},
      {"n", &G::n}};
  static const std::map<std::string, std::optional<double> G::*> numbers{
      {"temperature", &G::temperature},
      {"top_p", &G::top_p},
      {"min_p", &G::min_p},
      {"repetition_penalty", &G::repetition_penalty},
      {"presence_penalty", &G::presence_penalty},
      {"frequency_penalty", &G::frequency_penalty},
      {"deadline_s", &G::deadline_s}};
  static const std::map<std::string, std::optional<bool> G::*> flags{
      {"ignore_eos", &G::ignore_eos},
      {"timestamps", &G::timestamps},
      {"speculation", &G::speculation}};
  static const std::map<std::string, std::optional<std::string> G::*> texts{
      {"prompt", &G::prompt},         {"adapter", &G::adapter},
      {"cache", &G::cache},           {"cache_salt", &G::cache_salt},
      {"traceparent", &G::traceparent}};
  G into;
  for (const auto& [name, value] : as<Object>(fields)) {
    if (value.is_null() || set_chat(into, name, value, picture)) continue;
    if (const auto to = integers.find(name); to != integers.end()) {
      into.*(to->second) = integer(value);
    } else if (const auto real = numbers.find(name); real != numbers.end()) {
      into.*(real->second) = number(value);
    } else if (const auto flag = flags.find(name); flag != flags.end()) {
      into.*(flag->second) = as<bool>(value);
    } else if (const auto words = texts.find(name); words != texts.end()) {
      into.*(words->second) = text(value);
    } else if (name == "stop") {
      for (const auto& one : list(value)) into.stop.push_back(text(one));
    } else if (name == "logit_bias") {
      for (const auto& one : list(value)) {
        into.logit_bias.emplace_back(integer(list(one).at(0)), number(list(one).at(1)));
      }
    } else if (name == "response_format") {
      into.response_format = form(value);
    } else {
      into.extra.emplace_back(name, value);
    }
  }
  return into;
}

inline hearth::TokenizeRequest tokenize(const Value& fields, const Picture& picture) {
  hearth::TokenizeRequest into;
  for (const auto& [name, value] : as<Object>(fields)) {
    if (set_chat(into, name, value, picture)) continue;
    if (name == "text") {
      into.text = text(value);
    } else {
      into.extra.emplace_back(name, value);
    }
  }
  return into;
}

// --- answers; what has its default is left out ---

class Writer {
 public:
  Object fields;

  template <typename T>
  Writer& always(const char* name, const T& value) {
    fields.emplace_back(name, Value(value));
    return *this;
  }
  template <typename T>
  Writer& maybe(const char* name, const T& value) {
    return value == T{} ? *this : always(name, value);
  }
  template <typename T>
  Writer& maybe(const char* name, const std::optional<T>& value) {
    return value ? always(name, *value) : *this;
  }
  template <typename Items, typename Convert>
  Writer& list(const char* name, const Items& items, Convert convert) {
    if (items.empty()) return *this;
    Value::Array values;
    for (const auto& one : items) values.emplace_back(convert(one));
    return always(name, values);
  }
  template <typename Items>
  Writer& list(const char* name, const Items& items) {
    return list(name, items, [](const auto& one) { return Value(one); });
  }
};

inline Object fields_of(const hearth::Usage& usage) {
  return Writer()
      .always("prompt_tokens", usage.prompt_tokens)
      .always("completion_tokens", usage.completion_tokens)
      .maybe("reasoning_tokens", usage.reasoning_tokens)
      .maybe("cached_tokens", usage.cached_tokens)
      .maybe("queue_ms", usage.queue_ms)
      .maybe("prefill_ms", usage.prefill_ms)
      .maybe("decode_ms", usage.decode_ms)
      .fields;
}

inline Object fields_of(const hearth::Welcome& welcome) {
  const hearth::Limits& of = welcome.limits;
  Writer limits;
  limits.always("frame_bytes", of.frame_bytes)
      .always("frames", of.frames)
      .always("requests_per_client", of.requests_per_client)
      .always("prompt_tokens", of.prompt_tokens)
      .always("total_tokens", of.total_tokens)
      .always("queued_requests", of.queued_requests)
      .always("queued_tokens", of.queued_tokens)
      .always("lease_s", of.lease_s)
      .maybe("images", of.images)
      .maybe("image_bytes", of.image_bytes)
      .maybe("request_image_bytes", of.request_image_bytes)
      .maybe("image_tokens", of.image_tokens);
  return Writer()
      .always("proto", welcome.proto)
      .always("server", welcome.server)
      .always("limits", limits.fields)
      .list("features", welcome.features)
      .maybe("model", welcome.model)
      .maybe("epoch", welcome.epoch)
      .list("adapters", welcome.adapters)
      .maybe("tool_format", welcome.tool_format)
      .fields;
}

inline Object fields_of(const hearth::Accepted& accepted) {
  return Writer()
      .always("prompt_tokens", accepted.prompt_tokens)
      .maybe("request", accepted.request)
      .fields;
}

inline Object fields_of(const hearth::Delta& delta) {
  const auto pair = [](const auto& one) { return Value(Value::Array{one.first, one.second}); };
  return Writer()
      .always("seq", delta.seq)
      .always("text", delta.text)
      .always("tokens", Value::Array(delta.tokens.begin(), delta.tokens.end()))
      .list("logprobs", delta.logprobs,
            [&](const hearth::TokenLogprob& one) {
              return Writer()
                  .always("logprob", one.logprob)
                  .list("top", one.top, pair)
                  .maybe("token_bytes", one.token_bytes)
                  .list("top_bytes", one.top_bytes)
                  .fields;
            })
      .maybe("ended", delta.ended)
      .maybe("reasoning", delta.reasoning)
      .list("tool_calls", delta.tool_calls,
            [](const hearth::CallPiece& one) {
              return Writer()
                  .always("index", one.index)
                  .maybe("id", one.id)
                  .maybe("name", one.name)
                  .maybe("arguments", one.arguments)
                  .fields;
            })
      .maybe("choice", delta.choice)
      .fields;
}

inline Object fields_of(const hearth::Done& done) {
  Writer out;
  out.always("reason", done.reason).always("usage", fields_of(done.usage)).maybe("stop", done.stop);
  if (const auto& of = done.speculation) {
    out.always("speculation", Writer()
                                  .always("rounds", of->rounds)
                                  .always("drafted", of->drafted)
                                  .always("accepted", of->accepted)
                                  .always("accept_length", of->accept_length)
                                  .fields);
  }
  if (const auto& of = done.images) {
    out.always("images", Writer()
                             .always("count", of->count)
                             .always("tokens", of->tokens)
                             .maybe("cached", of->cached)
                             .list("sizes", of->sizes,
                                   [](const auto& one) {
                                     return Value(Value::Array{one.first, one.second});
                                   })
                             .maybe("decode_ms", of->decode_ms)
                             .maybe("resize_ms", of->resize_ms)
                             .maybe("engine_ms", of->engine_ms)
                             .fields);
  }
  out.list("choices", done.choices, [](const hearth::Ended& one) {
    return Writer()
        .always("reason", one.reason)
        .always("completion_tokens", one.completion_tokens)
        .maybe("stop", one.stop)
        .fields;
  });
  return out.fields;
}

inline Object fields_of(const hearth::Failure& failure) {
  Writer out;
  out.always("code", failure.code)
      .always("message", failure.message)
      .maybe("field", failure.field)
      .maybe("retry_after_s", failure.retry_after_s);
  if (failure.usage) out.always("usage", fields_of(*failure.usage));
  return out.fields;
}

}  // namespace forms

#endif
