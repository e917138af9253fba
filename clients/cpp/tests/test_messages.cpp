// Messages without a daemon: the vectors, malformed and hostile bytes, JSON text.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "checks.hpp"
#include "forms.hpp"

namespace {

using hearth::Value;
using Object = Value::Object;
using checks::code_of;

Value read_json(const std::string& path) {
  std::ifstream file(path);
  return Value::parse(std::string(std::istreambuf_iterator<char>(file), {}));
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

hearth::Bytes bytes_of(const std::string& hex) {
  const std::string bytes = from_hex(hex);
  return {bytes.begin(), bytes.end()};
}

bool is_default(const Value& value) {
  return value.is_null() || value == Value(0.0) || value == Value("") ||
         value == Value(Value::Array()) || value == Value(Object());
}

/// The meaning of a message: numbers as doubles but for large ones, names in order, defaults left
/// out, bytes in base64, and in place of a frame's number what lies in it.
Value meaning(const Value& value, const Value::Array& frames) {
  if (const auto* whole = value.get_if<std::int64_t>()) {
    return std::abs(*whole) < std::int64_t{1} << 53 ? Value(static_cast<double>(*whole)) : value;
  }
  if (const auto* bytes = value.get_if<hearth::Bytes>()) {
    return Value::parse(Value(*bytes).json());
  }
  if (const auto* items = value.get_if<Value::Array>()) {
    Value::Array out;
    for (const auto& one : *items) out.push_back(meaning(one, frames));
    return out;
  }
  if (const auto* fields = value.get_if<Object>()) {
    Object out;
    for (const auto& [name, field] : *fields) {
      const auto* number = field.get_if<std::int64_t>();
      Value of = name == "frame" && number && !frames.empty()
                     ? meaning(frames.at(static_cast<std::size_t>(*number - 1)), {})
                     : meaning(field, frames);
      const bool is_first_word = (name == "tool_choice" && of == Value("auto")) ||
                                 (name == "cache" && of == Value("use"));
      if (!is_default(of) && !is_first_word) out.emplace_back(name, std::move(of));
    }
    std::sort(out.begin(), out.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    return out;
  }
  return value;
}

void check_same(const Value& found, const Value& expected, const std::string& name,
                const Value::Array& found_frames = {}, const Value::Array& frames = {}) {
  const std::string a = meaning(found, found_frames).json(), b = meaning(expected, frames).json();
  CHECK_IN(a == b, name + "\n  found    " + a + "\n  expected " + b);
}

/// A typed answer, written as fields again.
Object typed(const std::string& kind, const Value& message) {
  Object fields{{"t", kind}};
  if (const Value* id = message.find("id")) fields.emplace_back("id", *id);
  const auto add = [&](Object more) {
    std::move(more.begin(), more.end(), std::back_inserter(fields));
  };
  if (kind == "welcome") {
    add(forms::fields_of(hearth::answer<hearth::Welcome>(message)));
  } else if (kind == "accepted") {
    add(forms::fields_of(hearth::answer<hearth::Accepted>(message)));
  } else if (kind == "delta") {
    add(forms::fields_of(hearth::answer<hearth::Delta>(message)));
  } else if (kind == "done") {
    add(forms::fields_of(hearth::answer<hearth::Done>(message)));
  } else if (kind == "error") {
    add(forms::fields_of(hearth::answer<hearth::Failure>(message)));
  } else if (kind == "status_report") {
    return hearth::answer<hearth::StatusReport>(message).fields;
  } else {
    return forms::as<Object>(message);
  }
  return fields;
}

void test_answers(const std::string& folder) {
  const Value vectors = read_json(folder + "/answers.json");
  for (const auto& vector : forms::list(vectors)) {
    const std::string name = forms::text_or(vector, "name");
    const std::string bytes = from_hex(forms::text_or(vector, "hex"));
    const Value message = hearth::decode(bytes);
    const Value* means = vector.find("means");
    const Value& expected = means ? *means : *vector.find("message");
    check_same(typed(forms::text_or(message, "t"), message), expected, name);
    check_same(hearth::decode(hearth::encode(message)), message, name);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      CHECK_IN(code_of([&] { hearth::decode({bytes.data(), size}); }) == "protocol_violation", name);
    }
    CHECK_IN(code_of([&] { hearth::decode(bytes + '\0'); }) == "protocol_violation", name);
  }
}

void test_requests(const std::string& folder) {
  const Value vectors = read_json(folder + "/requests.json");
  for (const auto& vector : forms::list(vectors)) {
    const std::string name = forms::text_or(vector, "name");
    const Value message = hearth::decode(from_hex(forms::text_or(vector, "hex")));
    const Value* means = vector.find("means");
    const Value& expected = means ? *means : *vector.find("message");
    const Value* listed = vector.find("frames");
    Value::Array frames;
    if (listed) {
      for (const auto& one : forms::list(*listed)) frames.push_back(bytes_of(forms::text(one)));
    }
    const auto picture = [&](const Value& part) {
      const auto which = static_cast<std::size_t>(forms::integer_or(part, "frame") - 1);
      return forms::picture(part, *frames.at(which).get_if<hearth::Bytes>());
    };
    const std::string kind = forms::text_or(message, "t");
    Object fields = forms::as<Object>(message);
    fields.erase(std::remove_if(fields.begin(), fields.end(),
                                [](const auto& one) { return one.first == "t" || one.first == "id"; }),
                 fields.end());
    hearth::WireRequest wire{fields, {}};
    if (kind == "generate") wire = hearth::wire(forms::generate(fields, picture));
    if (kind == "tokenize") wire = hearth::wire(forms::tokenize(fields, picture));
    Value::Array sent;
    for (const auto& frame : wire.frames) sent.emplace_back(*frame);
    wire.fields.emplace_back("t", kind);
    if (const Value* id = message.find("id")) wire.fields.emplace_back("id", *id);
    check_same(wire.fields, expected, name, sent, frames);
    check_same(hearth::decode(hearth::encode(wire.fields)), wire.fields, name);
  }
}

void test_malformed(const std::string& folder) {
  const Value vectors = read_json(folder + "/malformed.json");
  for (const auto& vector : forms::list(vectors)) {
    const std::string bytes = from_hex(forms::text_or(vector, "hex"));
    code_of([&] { typed("delta", hearth::decode(bytes)); });  // Throws nothing but Error.
  }
  const std::string most = "\xff\xff\xff\xff";
  for (const std::string& hostile :
       {"\xdd" + most, "\xdf" + most, "\xdb" + most, "\xc6" + most, "\xc9" + most + "\x01",
        std::string(100000, '\x91') + '\x01', std::string(100000, '\x81'), std::string("\xc1"),
        std::string("\xa2\xc0\x80", 3), std::string("\xa3\xed\xa0\x80", 4), std::string()}) {
    CHECK(code_of([&] { hearth::decode(hostile); }) == "protocol_violation");
  }
  for (const char* wrong : {R"([1])", R"({"text": ""})", R"({"seq": "0", "text": ""})",
                            R"({"seq": 0.0, "text": ""})", R"({"seq": 0, "text": 1})",
                            R"({"seq": 0, "text": "", "tokens": 1})",
                            R"({"seq": 0, "text": "", "logprobs": [{"top": []}]})",
                            R"({"seq": 0, "text": "", "logprobs": [{"logprob": 0, "top": [[1]]}]})"}) {
    CHECK_IN(code_of([&] { hearth::answer<hearth::Delta>(Value::parse(wrong)); }) ==
                 "protocol_violation", wrong);
  }
  // What is unknown here may have any form: names that are numbers, wide integers, extensions.
  const std::string later = "\x82\x01\x80\xa1k\x92\xcf" + most + most + std::string("\xd4\x05\x00", 3);
  CHECK(forms::list(*hearth::decode(later).find("k")).size() == 2);
}

void test_json() {
  for (const char* text : {"null", "true", "-7", "0.5", "1e+300", R"("a\"\\\u0001é🙂")", "[]", "{}",
                           R"({"b":[1,{"a":null}],"a":-0.25})", "9223372036854775807"}) {
    CHECK_IN(Value::parse(text).json() == text, text);
  }
  CHECK(Value::parse(R"("\ud83d\ude42\/\n")") == Value("🙂/\n"));
  CHECK(Value(hearth::Bytes{1, 2, 3, 4}).json() == R"("AQIDBA==")");
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[1,]"), std::string("{\"a\"}"),
        std::string("01"), std::string("1."), std::string("+1"), std::string("nul"),
        std::string("\"a"), std::string("\"\\x\""), std::string("\"\\ud83d\""),
        std::string("\"\\u12\""), std::string("\"\n\""), std::string("1 2"), std::string("\"\xff\""),
        std::string("1e999"), std::string(100000, '['), std::string("\"\\")}) {
    CHECK_IN(code_of([&] { Value::parse(text); }) == "invalid_value", text.substr(0, 20));
  }
}

void test_replies() {
  hearth::Reply reply;
  hearth::Delta delta;
  delta.reasoning = "It wants light.";
  delta.tool_calls = {{0, "c1", "set", "{\"on\":"}, {1, "c2", "get", "{\"cut"}};
  reply.add(delta);
  CHECK(code_of([&] { reply.message(); }) == "reply_empty");
  delta.reasoning.clear();
  delta.tool_calls = {{0, "", "", " true}"}};
  reply.add(delta);
  const hearth::Message turn = reply.message();
  CHECK(!turn.content && turn.reasoning == "It wants light.");
  CHECK(turn.tool_calls.size() == 1 && turn.tool_calls[0].id == "c1");
  CHECK(turn.tool_calls[0].arguments == Object({{"on", true}}));
  CHECK(code_of([] { hearth::Image::encoded({1, 2, 3}); }) == "image_invalid");
  CHECK(code_of([] { hearth::Image::file("/nowhere"); }) == "image_invalid");
}

void test_addresses() {
  CHECK(hearth::detail::resolve_address("/a/s") == "ipc:///a/s");
  CHECK(hearth::detail::resolve_address("ipc:///a/s") == "ipc:///a/s");
  CHECK(hearth::detail::resolve_address("tcp://127.0.0.1:7700") == "tcp://127.0.0.1:7700");
  CHECK(code_of([] { hearth::detail::resolve_address("udp://a"); }) == "connection_failed");
  CHECK(code_of([] { hearth::detail::resolve_address(std::string(108, 'a')); }) ==
        "connection_failed");
}

}  // namespace

int main(int, char** arguments) {
  test_answers(arguments[1]);
  test_requests(arguments[1]);
  test_malformed(arguments[1]);
  test_json();
  test_replies();
  test_addresses();
  return checks::failures() == 0 ? 0 : 1;
}
