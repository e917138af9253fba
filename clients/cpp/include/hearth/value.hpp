// Values without a fixed form (schemas, arguments, reports), as JSON text and as msgpack.
#ifndef HEARTH_VALUE_HPP
#define HEARTH_VALUE_HPP

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <msgpack.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"

namespace hearth {

using Bytes = std::vector<std::uint8_t>;

/// A value of JSON, or bytes. Maps keep their order, for models read schemas in it.
class Value {
 public:
  using Array = std::vector<Value>;
  using Object = std::vector<std::pair<std::string, Value>>;

  Value() = default;
  Value(std::nullptr_t) {}
  Value(bool flag) : held_(flag) {}
  template <typename Int, std::enable_if_t<std::is_integral_v<Int>, int> = 0>
  Value(Int number) : held_(static_cast<std::int64_t>(number)) {}
  Value(double number) : held_(number) {}
  Value(const char* text) : held_(std::string(text)) {}
  Value(std::string text) : held_(std::move(text)) {}
  Value(Bytes bytes) : held_(std::move(bytes)) {}
  Value(Array items) : held_(std::move(items)) {}
  Value(Object fields) : held_(std::move(fields)) {}

  /// The value of JSON text; throws RequestRefused (invalid_value) for what is none.
  static Value parse(std::string_view text);
  /// JSON text; bytes are written in base64, numbers that are not finite as null.
  std::string json() const;

  /// The alternative that is held, null where it is another: `value.get_if<std::string>()`.
  template <typename T>
  const T* get_if() const noexcept {
    return std::get_if<T>(&held_);
  }
  bool is_null() const noexcept { return std::holds_alternative<std::monostate>(held_); }
  /// The field of a map, null where it is no map or has none of that name.
  const Value* find(std::string_view name) const noexcept {
    if (const auto* fields = get_if<Object>()) {
      for (const auto& [key, value] : *fields) {
        if (key == name) return &value;
      }
    }
    return nullptr;
  }

  friend bool operator==(const Value& a, const Value& b) { return a.held_ == b.held_; }
  friend bool operator!=(const Value& a, const Value& b) { return !(a == b); }

 private:
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes, Array, Object> held_;
};

/// Read one msgpack value; throws ConnectionFailed (protocol_violation) for other bytes.
Value decode(std::string_view bytes);
/// Write a value as msgpack.
std::string encode(const Value& value);

namespace detail {

inline constexpr std::size_t most_nesting = 96;  // PROTOCOL.md: 64 of a schema, within a request.
inline constexpr std::size_t most_values = std::size_t{1} << 22;

/// True for UTF-8 without overlong forms, surrogates and what lies above U+10FFFF.
inline bool is_utf8(std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || text.size() - i < static_cast<std::size_t>(more)) return false;
    std::uint32_t point = lead & (0x3Fu >> more);
    for (int k = 0; k < more; ++k) {
      const auto next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xC0) != 0x80) return false;
      point = point << 6 | (next & 0x3F);
    }
    if (more == 2 && (point < 0x800 || (point >= 0xD800 && point < 0xE000))) return false;
    if (more == 3 && (point < 0x10000 || point > 0x10FFFF)) return false;
  }
  return true;
}

inline void append_utf8(std::string& out, std::uint32_t point) {
  const auto add = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (point < 0x80) return add(point);
  if (point < 0x800) {
    add(0xC0 | point >> 6);
  } else {
    if (point < 0x10000) {
      add(0xE0 | point >> 12);
    } else {
      add(0xF0 | point >> 18);
      add(0x80 | (point >> 12 & 0x3F));
    }
    add(0x80 | (point >> 6 & 0x3F));
  }
  add(0x80 | (point & 0x3F));
}

inline std::string base64(const Bytes& bytes) {
  static constexpr char letters[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t left = bytes.size() - i;
    std::uint32_t three = static_cast<std::uint32_t>(bytes[i]) << 16;
    if (left > 1) three |= static_cast<std::uint32_t>(bytes[i + 1]) << 8;
    if (left > 2) three |= bytes[i + 2];
    out += letters[three >> 18];
    out += letters[three >> 12 & 63];
    out += left > 1 ? letters[three >> 6 & 63] : '=';
    out += left > 2 ? letters[three & 63] : '=';
  }
  return out;
}

/// Parser of JSON text, by RFC 8259; of two equal names the first counts.
class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Value whole() {
    if (!is_utf8(text_)) fail("it is not UTF-8");
    Value value = any(0);
    space();
    if (at_ < text_.size()) fail("something follows it");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    raise(refusal("invalid_value", "the text is no JSON at byte " + std::to_string(at_) + ": " + why));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }
  bool take(std::string_view what) {
    const bool found = text_.substr(at_, what.size()) == what;
    if (found) at_ += what.size();
    return found;
  }
  Value any(std::size_t depth) {
    if (depth > most_nesting) fail("it is nested too deep");
    space();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return text();
      default:
        if (take("true")) return true;
        if (take("false")) return false;
        if (take("null")) return nullptr;
        return number();
    }
  }
  Value object(std::size_t depth) {
    Value::Object fields;
    ++at_;
    space();
    if (take("}")) return fields;
    do {
      space();
      if (peek() != '"') fail("a name is missing");
      std::string name = text();
      space();
      if (!take(":")) fail("a colon is missing");
      fields.emplace_back(std::move(name), any(depth + 1));
      space();
    } while (take(","));
    if (!take("}")) fail("a map does not end");
    return fields;
  }
  Value array(std::size_t depth) {
    Value::Array items;
    ++at_;
    space();
    if (take("]")) return items;
    do {
      items.push_back(any(depth + 1));
      space();
    } while (take(","));
    if (!take("]")) fail("a list does not end");
    return items;
  }
  std::uint32_t hex4() {
    std::uint32_t unit = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), unit, 16);
    if (fault != std::errc() || end != digits.data() + 4) fail("an escape is cut");
    at_ += 4;
    return unit;
  }
  std::uint32_t escaped_point() {
    const std::uint32_t unit = hex4();
    if (unit < 0xD800 || unit >= 0xE000) return unit;
    if (unit >= 0xDC00 || !take("\\u")) fail("half a character");
    const std::uint32_t low = hex4();
    if (low < 0xDC00 || low >= 0xE000) fail("half a character");
    return 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
  }
  std::string text() {
    static constexpr std::string_view names = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    std::string out;
    ++at_;
    while (true) {
      if (at_ == text_.size()) fail("a text does not end");
      const char next = text_[at_++];
      if (next == '"') return out;
      if (static_cast<unsigned char>(next) < 0x20) fail("a control character stands in a text");
      if (next != '\\') {
        out += next;
      } else if (take("u")) {
        append_utf8(out, escaped_point());
      } else {
        const std::size_t which = at_ < text_.size() ? names.find(text_[at_]) : names.npos;
        if (which == names.npos) fail("there is no such escape");
        ++at_;
        out += meant[which];
      }
    }
  }
  std::size_t digits() {
    const std::size_t from = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    if (at_ == from) fail("a value is missing");
    return from;
  }
  Value number() {
    const std::size_t from = at_;
    take("-");
    const std::size_t first = digits();
    if (text_[first] == '0' && at_ > first + 1) fail("a number begins with 0");
    bool whole = true;
    if (take(".")) whole = (digits(), false);
    if (take("e") || take("E")) {
      if (!take("+")) take("-");
      whole = (digits(), false);
    }
    const char *begin = text_.data() + from, *end = text_.data() + at_;
    std::int64_t integer = 0;
    if (whole && std::from_chars(begin, end, integer).ec == std::errc()) return integer;
    double real = 0;
    if (std::from_chars(begin, end, real).ec != std::errc()) fail("a number is out of range");
    return real;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

inline void write_text(std::string& out, std::string_view text) {
  static constexpr char digits[] = "0123456789abcdef";
  out += '"';
  for (const char one : text) {
    if (one == '"' || one == '\\') {
      out += '\\';
      out += one;
    } else if (static_cast<unsigned char>(one) < 0x20) {
      out += "\\u00";
      out += digits[one >> 4];
      out += digits[one & 15];
    } else {
      out += one;
    }
  }
  out += '"';
}

template <typename Number>
void write_number(std::string& out, Number number) {
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

inline void write_json(std::string& out, const Value& value) {
  if (const auto* flag = value.get_if<bool>()) {
    out += *flag ? "true" : "false";
  } else if (const auto* integer = value.get_if<std::int64_t>()) {
    write_number(out, *integer);
  } else if (const auto* real = value.get_if<double>(); real && std::isfinite(*real)) {
    const std::size_t from = out.size();
    write_number(out, *real);
    // A whole number stays a float to its reader.
    if (out.find_first_of(".e", from) == out.npos) out += ".0";
  } else if (const auto* text = value.get_if<std::string>()) {
    write_text(out, *text);
  } else if (const auto* bytes = value.get_if<Bytes>()) {
    write_text(out, base64(*bytes));
  } else if (const auto* items = value.get_if<Value::Array>()) {
    char before = '[';
    for (const auto& item : *items) {
      out += before;
      write_json(out, item);
      before = ',';
    }
    out += items->empty() ? "[]" : "]";
  } else if (const auto* fields = value.get_if<Value::Object>()) {
    char before = '{';
    for (const auto& [name, field] : *fields) {
      out += before;
      write_text(out, name);
      out += ':';
      write_json(out, field);
      before = ',';
    }
    out += fields->empty() ? "{}" : "}";
  } else {
    out += "null";
  }
}

/// Visitor of a msgpack parser; nothing is allocated by a count that the bytes only claim.
class Decoder : public msgpack::null_visitor {
 public:
  bool visit_nil() { return put(nullptr); }
  bool visit_boolean(bool flag) { return put(flag); }
  bool visit_positive_integer(std::uint64_t number) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    // Only a field that is unknown here can have a wider one.
    return number > most ? put(static_cast<double>(number)) : put(number);
  }
  bool visit_negative_integer(std::int64_t number) { return put(number); }
  bool visit_float32(float number) { return put(static_cast<double>(number)); }
  bool visit_float64(double number) { return put(number); }
  bool visit_str(const char* data, std::uint32_t size) {
    const std::string_view text(data, size);
    if (!is_utf8(text)) return false;
    if (open_.empty() || !open_.back().at_key) return put(std::string(text));
    open_.back().key = text;
    return count();
  }
  bool visit_bin(const char* data, std::uint32_t size) { return put(Bytes(data, data + size)); }
  bool visit_ext(const char*, std::uint32_t) { return put(nullptr); }
  bool start_array(std::uint32_t) { return open(Value::Array()); }
  bool end_array() { return close(); }
  bool start_map(std::uint32_t) { return open(Value::Object()); }
  bool end_map() { return close(); }
  bool start_map_key() { return open_.back().at_key = true; }
  bool end_map_key() { return !(open_.back().at_key = false); }

  Value root;

 private:
  struct Level {
    std::variant<Value::Array, Value::Object> held;
    std::string key;
    bool at_key = false;
  };

  bool count() { return ++values_ <= most_values; }
  bool put(Value value) {
    if (open_.empty()) {
      root = std::move(value);
      return true;
    }
    Level& level = open_.back();
    if (level.at_key) {
      level.key = value.json();  // Only a field that is unknown here has such names.
    } else if (auto* items = std::get_if<Value::Array>(&level.held)) {
      items->push_back(std::move(value));
    } else {
      std::get<Value::Object>(level.held).emplace_back(std::move(level.key), std::move(value));
    }
    return count();
  }
  template <typename Container>
  bool open(Container empty) {
    if (open_.size() > most_nesting) return false;
    open_.push_back({std::move(empty), {}, false});
    return true;
  }
  bool close() {
    auto held = std::move(open_.back().held);
    open_.pop_back();
    return std::visit([this](auto& one) { return put(Value(std::move(one))); }, held);
  }

  std::vector<Level> open_;
  std::size_t values_ = 0;
};

template <typename Packer>
void write_msgpack(Packer& packer, const Value& value) {
  const auto size = [](const auto& of) { return static_cast<std::uint32_t>(of.size()); };
  if (const auto* flag = value.get_if<bool>()) {
    packer.pack(*flag);
  } else if (const auto* integer = value.get_if<std::int64_t>()) {
    packer.pack(*integer);
  } else if (const auto* real = value.get_if<double>()) {
    packer.pack_double(*real);
  } else if (const auto* text = value.get_if<std::string>()) {
    packer.pack_str(size(*text)).pack_str_body(text->data(), size(*text));
  } else if (const auto* bytes = value.get_if<Bytes>()) {
    packer.pack_bin(size(*bytes))
        .pack_bin_body(reinterpret_cast<const char*>(bytes->data()), size(*bytes));
  } else if (const auto* items = value.get_if<Value::Array>()) {
    packer.pack_array(size(*items));
    for (const auto& item : *items) write_msgpack(packer, item);
  } else if (const auto* fields = value.get_if<Value::Object>()) {
    packer.pack_map(size(*fields));
    for (const auto& [name, field] : *fields) {
      packer.pack_str(size(name)).pack_str_body(name.data(), size(name));
      write_msgpack(packer, field);
    }
  } else {
    packer.pack_nil();
  }
}

}  // namespace detail

inline Value Value::parse(std::string_view text) { return detail::JsonParser(text).whole(); }

inline std::string Value::json() const {
  std::string out;
  detail::write_json(out, *this);
  return out;
}

inline Value decode(std::string_view bytes) {
  detail::Decoder decoder;
  std::size_t end = 0;
  if (!msgpack::parse(bytes.data(), bytes.size(), end, decoder) || end != bytes.size()) {
    raise(detail::broken("protocol_violation", "the server sent a message that cannot be read"));
  }
  return std::move(decoder.root);
}

inline std::string encode(const Value& value) {
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  detail::write_msgpack(packer, value);
  return {buffer.data(), buffer.size()};
}

}  // namespace hearth

#endif
