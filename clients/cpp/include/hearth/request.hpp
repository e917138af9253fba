// Requests by types; PROTOCOL.md tells the meaning and the range of each field.
#ifndef HEARTH_REQUEST_HPP
#define HEARTH_REQUEST_HPP

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"
#include "value.hpp"

namespace hearth {

/// Bytes behind a message, shared with whoever sends them.
using Frame = std::shared_ptr<const Bytes>;

/// A picture: a file (JPEG, PNG, WebP, GIF), or raw pixels in a layout by ROS's name for it.
class Image {
 public:
  /// The file at `path`, read now; throws RequestRefused (image_invalid) where that fails.
  static Image file(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    Bytes bytes{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) raise(detail::refusal("image_invalid", "cannot read the picture " + path));
    return encoded(std::move(bytes));
  }
  /// The bytes of a file; throws RequestRefused (image_invalid) for another format.
  static Image encoded(Bytes bytes) {
    std::string format = format_of(bytes);
    if (format.empty()) {
      raise(detail::refusal("image_invalid",
                            "this is no JPEG, PNG, WebP or GIF file: give raw pixels their encoding"));
    }
    return {std::move(bytes), {{"format", std::move(format)}}};
  }
  /// Raw pixels; `step` is the bytes from one row to the next, 0 where none lie between them.
  static Image pixels(Bytes bytes, std::string encoding, std::int64_t width, std::int64_t height,
                      std::int64_t step = 0) {
    Value::Object says{
        {"encoding", std::move(encoding)}, {"width", width}, {"height", height}};
    if (step != 0) says.emplace_back("step", step);
    return {std::move(bytes), std::move(says)};
  }

  const Frame& frame() const noexcept { return frame_; }
  /// Fields of the part that say what the frame is.
  const Value::Object& says() const noexcept { return says_; }

 private:
  Image(Bytes bytes, Value::Object says)
      : frame_(std::make_shared<const Bytes>(std::move(bytes))), says_(std::move(says)) {}

  static std::string format_of(const Bytes& bytes) {
    const std::string head(bytes.begin(), bytes.begin() + std::min<std::ptrdiff_t>(12, std::distance(bytes.begin(), bytes.end())));
    if (head.compare(0, 2, "\xff\xd8") == 0) return "jpeg";
    if (head.compare(0, 4, "\x89PNG") == 0) return "png";
    if (head.compare(0, 4, "RIFF") == 0 && head.compare(8, 4, "WEBP") == 0) return "webp";
    return head.compare(0, 4, "GIF8") == 0 ? "gif" : "";
  }

  Frame frame_;
  Value::Object says_;
};

/// Pictures of one size in their order, each with its time in seconds.
struct Video {
  std::vector<std::pair<Image, double>> frames;
};

/// A piece of a turn: text, a picture or a video.
using Part = std::variant<std::string, Image, Video>;

/// A call of a tool by the model; its result gives the `id` again.
struct ToolCall {
  std::string id;
  std::string name;
  Value::Object arguments;
};

/// One turn of a conversation. Roles are system, developer, user, assistant and tool.
struct Message {
  std::string role;
  std::optional<std::variant<std::string, std::vector<Part>>> content;
  std::string reasoning;
  std::vector<ToolCall> tool_calls;
  std::string tool_call_id;
  std::string name;

  static Message system(std::string text) { return of("system", std::move(text)); }
  static Message user(std::string text) { return of("user", std::move(text)); }
  static Message user(std::vector<Part> parts) { return of("user", std::move(parts)); }
  static Message assistant(std::string text) { return of("assistant", std::move(text)); }
  /// The result of a call, empty or not.
  static Message tool(std::string call_id, std::string result) {
    Message turn = of("tool", std::move(result));
    turn.tool_call_id = std::move(call_id);
    return turn;
  }

 private:
  template <typename Content>
  static Message of(const char* role, Content content) {
    Message turn;
    turn.role = role;
    turn.content = std::move(content);
    return turn;
  }
};

/// A tool that the model may call; `parameters` is a JSON schema of its arguments.
struct Tool {
  std::string name;
  std::string description;
  Value parameters = Value::Object();
  bool strict = false;
};

/// The one tool that has to be called.
struct NamedTool {
  std::string name;
};

/// "auto", "none", "required", or one tool.
using ToolChoice = std::variant<std::string, NamedTool>;

/// A JSON object.
struct JsonObject {};
/// JSON that the schema allows.
struct JsonSchema {
  Value schema;
};
/// Text that all of a regular expression matches.
struct Regex {
  std::string regex;
};
/// Text of a grammar in the notation of Lark.
struct Lark {
  std::string grammar;
};
/// A form that the answer must have.
using ResponseFormat = std::variant<JsonObject, JsonSchema, Regex, Lark>;

/// What goes with a conversation, to be answered or to be counted.
struct ChatOptions {
  std::vector<Message> messages;
  std::vector<Tool> tools;
  std::optional<ToolChoice> tool_choice;
  std::optional<bool> parallel_tool_calls;
  /// Variables of the chat template, {"enable_thinking", false} for instance.
  Value::Object chat_template;
  /// Fields that a newer daemon offers, by their names on the wire.
  Value::Object extra;
};

/// A request for text: `messages` or a raw `prompt`. What is not set is left to the daemon.
struct GenerateRequest : ChatOptions {
  std::optional<std::string> prompt;
  std::optional<std::int64_t> max_tokens;
  std::optional<double> temperature;
  std::optional<std::int64_t> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::vector<std::pair<std::int64_t, double>> logit_bias;
  std::optional<std::int64_t> seed;
  std::vector<std::string> stop;
  std::optional<std::int64_t> logprobs;
  std::optional<bool> ignore_eos;
  std::optional<std::int64_t> priority;
  std::optional<double> deadline_s;
  std::optional<bool> timestamps;
  std::optional<bool> speculation;
  std::optional<std::string> adapter;
  std::optional<std::string> cache;
  std::optional<std::string> cache_salt;
  std::optional<std::string> traceparent;
  std::optional<ResponseFormat> response_format;
  std::optional<std::int64_t> reasoning_budget;
  std::optional<std::int64_t> n;

  /// A conversation of one turn.
  static GenerateRequest ask(std::string text) {
    GenerateRequest request;
    request.messages.push_back(Message::user(std::move(text)));
    return request;
  }
};

/// A request for token ids: of `text`, which may be empty, or of `messages`.
struct TokenizeRequest : ChatOptions {
  std::optional<std::string> text;
};

/// Fields of a request by their names on the wire, and the frames behind it, counted from 1.
struct WireRequest {
  Value::Object fields;
  std::vector<Frame> frames;
};

namespace detail {

/// Writer of a request's fields; what is not set is left out.
class RequestWriter {
 public:
  WireRequest taken() { return std::move(wire_); }

  template <typename T>
  void set(const char* name, const std::optional<T>& value) {
    if (value) wire_.fields.emplace_back(name, *value);
  }
  template <typename Items, typename Convert>
  void list(const char* name, const Items& items, Convert convert) {
    if (items.empty()) return;
    Value::Array values;
    for (const auto& item : items) values.push_back(convert(item));
    wire_.fields.emplace_back(name, std::move(values));
  }
  void chat(const ChatOptions& options) {
    list("messages", options.messages, [this](const Message& one) { return turn(one); });
    list("tools", options.tools, tool);
    if (options.tool_choice) {
      const auto* named = std::get_if<NamedTool>(&*options.tool_choice);
      wire_.fields.emplace_back("tool_choice",
                                named ? Value(Value::Object{{"name", named->name}})
                                      : Value(std::get<std::string>(*options.tool_choice)));
    }
    set("parallel_tool_calls", options.parallel_tool_calls);
    if (!options.chat_template.empty()) wire_.fields.emplace_back("template", options.chat_template);
    for (const auto& field : options.extra) wire_.fields.push_back(field);
  }
  void form(const std::optional<ResponseFormat>& asked) {
    if (!asked) return;
    Value::Object form;
    if (std::holds_alternative<JsonObject>(*asked)) {
      form = {{"type", "json_object"}};
    } else if (const auto* json = std::get_if<JsonSchema>(&*asked)) {
      form = {{"type", "json_schema"}, {"schema", json->schema}};
    } else if (const auto* regex = std::get_if<Regex>(&*asked)) {
      form = {{"type", "regex"}, {"regex", regex->regex}};
    } else {
      form = {{"type", "lark"}, {"grammar", std::get<Lark>(*asked).grammar}};
    }
    wire_.fields.emplace_back("response_format", std::move(form));
  }

 private:
  static Value tool(const Tool& one) {
    Value::Object fields{{"name", one.name}};
    if (!one.description.empty()) fields.emplace_back("description", one.description);
    if (one.parameters != Value(Value::Object())) fields.emplace_back("parameters", one.parameters);
    if (one.strict) fields.emplace_back("strict", true);
    return fields;
  }
  static Value call(const ToolCall& one) {
    Value::Object fields{{"id", one.id}, {"name", one.name}};
    if (!one.arguments.empty()) fields.emplace_back("arguments", one.arguments);
    return fields;
  }
  Value::Object picture(Value::Object fields, const Image& image) {
    wire_.frames.push_back(image.frame());
    fields.emplace_back("frame", wire_.frames.size());
    fields.insert(fields.end(), image.says().begin(), image.says().end());
    return fields;
  }
  Value part(const Part& one) {
    if (const auto* text = std::get_if<std::string>(&one)) {
      return Value::Object{{"type", "text"}, {"text", *text}};
    }
    if (const auto* image = std::get_if<Image>(&one)) return picture({{"type", "image"}}, *image);
    Value::Array frames;
    for (const auto& [image, time_s] : std::get<Video>(one).frames) {
      frames.emplace_back(picture({{"time_s", time_s}}, image));
    }
    return Value::Object{{"type", "video"}, {"frames", std::move(frames)}};
  }
  Value turn(const Message& one) {
    Value::Object fields{{"role", one.role}};
    if (one.content) {
      if (const auto* text = std::get_if<std::string>(&*one.content)) {
        fields.emplace_back("content", *text);
      } else {
        Value::Array parts;
        for (const auto& piece : std::get<std::vector<Part>>(*one.content)) {
          parts.push_back(part(piece));
        }
        fields.emplace_back("content", std::move(parts));
      }
    }
    if (!one.reasoning.empty()) fields.emplace_back("reasoning", one.reasoning);
    if (!one.tool_calls.empty()) {
      Value::Array calls;
      for (const auto& made : one.tool_calls) calls.push_back(call(made));
      fields.emplace_back("tool_calls", std::move(calls));
    }
    if (!one.tool_call_id.empty()) fields.emplace_back("tool_call_id", one.tool_call_id);
    if (!one.name.empty()) fields.emplace_back("name", one.name);
    return fields;
  }

  WireRequest wire_;
};

}  // namespace detail

/// The fields and frames of a typed request.
inline WireRequest wire(const GenerateRequest& request) {
  detail::RequestWriter writer;
  writer.set("prompt", request.prompt);
  writer.set("max_tokens", request.max_tokens);
  writer.set("temperature", request.temperature);
  writer.set("top_k", request.top_k);
  writer.set("top_p", request.top_p);
  writer.set("min_p", request.min_p);
  writer.set("repetition_penalty", request.repetition_penalty);
  writer.set("presence_penalty", request.presence_penalty);
  writer.set("frequency_penalty", request.frequency_penalty);
  writer.list("logit_bias", request.logit_bias,
              [](const auto& one) { return Value(Value::Array{one.first, one.second}); });
  writer.set("seed", request.seed);
  writer.list("stop", request.stop, [](const std::string& one) { return Value(one); });
  writer.set("logprobs", request.logprobs);
  writer.set("ignore_eos", request.ignore_eos);
  writer.set("priority", request.priority);
  writer.set("deadline_s", request.deadline_s);
  writer.set("timestamps", request.timestamps);
  writer.set("speculation", request.speculation);
  writer.set("adapter", request.adapter);
  writer.set("cache", request.cache);
  writer.set("cache_salt", request.cache_salt);
  writer.set("traceparent", request.traceparent);
  writer.form(request.response_format);
  writer.set("reasoning_budget", request.reasoning_budget);
  writer.set("n", request.n);
  writer.chat(request);
  return writer.taken();
}

inline WireRequest wire(const TokenizeRequest& request) {
  detail::RequestWriter writer;
  writer.set("text", request.text);
  writer.chat(request);
  return writer.taken();
}

}  // namespace hearth

#endif
