// The C ABI over the C++ client.
#include "hearth.h"

#include <cstdlib>
#include <cstring>
#include <hearth/hearth.hpp>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using hearth::Value;

/// Copy a text into a struct's own array, cut between two characters where it is longer.
template <std::size_t Size>
void copy_text(char (&into)[Size], const std::string& text) {
  std::size_t size = std::min(text.size(), Size - 1);
  while (size > 0 && size < text.size() && (text[size] & 0xC0) == 0x80) --size;
  std::memcpy(into, text.data(), size);
  into[size] = '\0';
}

hearth_usage c_usage(const hearth::Usage& usage) {
  return {usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens,
          usage.cached_tokens, usage.queue_ms,          usage.prefill_ms,
          usage.decode_ms};
}

int kind_of(hearth::Kind kind) {
  switch (kind) {
    case hearth::Kind::request:
      return HEARTH_REQUEST;
    case hearth::Kind::connection:
      return HEARTH_CONNECTION;
    case hearth::Kind::service:
      break;
  }
  return HEARTH_SERVICE;
}

hearth_error c_error(const hearth::Failure& failure) {
  hearth_error error{};
  error.kind = kind_of(failure.kind);
  error.retry_after_s = failure.retry_after_s.value_or(-1);
  if (failure.usage) {
    error.has_usage = 1;
    error.usage = c_usage(*failure.usage);
  }
  copy_text(error.code, failure.code);
  copy_text(error.field, failure.field);
  copy_text(error.message, failure.message);
  return error;
}

int wrong_call(hearth_error* into, const char* code, const char* message) {
  if (into) {
    *into = {};
    into->kind = HEARTH_USAGE;
    into->retry_after_s = -1;
    copy_text(into->code, code);
    copy_text(into->message, message);
  }
  return HEARTH_USAGE;
}

struct WrongCall {
  const char* message;
};

void require(const void* pointer, const char* message) {
  if (!pointer) throw WrongCall{message};
}

/// Run a call's body; what it throws becomes its error.
template <typename Body>
int guarded(hearth_error* into, Body body) noexcept {
  try {
    body();
    return HEARTH_OK;
  } catch (const hearth::Error& error) {
    if (into) *into = c_error(error.failure());
    return kind_of(error.failure().kind);
  } catch (const WrongCall& wrong) {
    return wrong_call(into, "invalid_call", wrong.message);
  } catch (const std::bad_alloc&) {
    return wrong_call(into, "out_of_memory", "no memory is left in this process");
  } catch (const std::exception& error) {
    return wrong_call(into, "internal", error.what());
  } catch (...) {
    return wrong_call(into, "internal", "a fault of the library");
  }
}

/// A copy that the caller frees, with a 0 behind it.
template <typename T>
T* given_away(const T* data, std::size_t count) {
  auto* copy = static_cast<T*>(std::malloc((count + 1) * sizeof(T)));
  if (!copy) throw std::bad_alloc();
  if (count > 0) std::memcpy(copy, data, count * sizeof(T));
  copy[count] = T{};
  return copy;
}

char* given_away(const std::string& text) { return given_away(text.data(), text.size()); }

Value::Object map_of(const char* json) {
  const Value value = Value::parse(json);
  if (const auto* fields = value.get_if<Value::Object>()) return *fields;
  hearth::raise(hearth::detail::refusal("invalid_value", "the text is no JSON map"));
}

hearth::WireRequest request_of(const char* json, const hearth_frame* frames, std::size_t count) {
  require(json, "request_json is NULL");
  if (count > 0) require(frames, "frames is NULL");
  hearth::WireRequest request{map_of(json), {}};
  for (std::size_t i = 0; i < count; ++i) {
    if (frames[i].size > 0) require(frames[i].data, "a frame's data is NULL");
    const auto* data = static_cast<const std::uint8_t*>(frames[i].data);
    request.frames.push_back(
        std::make_shared<const hearth::Bytes>(data, data + frames[i].size));
  }
  return request;
}

hearth::ClientOptions options_of(const char* json) {
  hearth::ClientOptions options;
  if (!json) return options;
  for (const auto& field : map_of(json)) {
    const std::string& name = field.first;
    const auto refuse = [&name](const char* code, const char* what) {
      hearth::raise(hearth::detail::refusal(code, name + what, name));
    };
    bool known = false;
    const auto take = [&](const char* of, auto& into) {
      if (name != of) return;
      known = true;
      const Value map(Value::Object{field});
      hearth::detail::FieldReader(map, name).maybe(of, into);
    };
    try {
      std::int64_t buffer_bytes = 0;
      std::optional<std::vector<std::string>> features;
      take("address", options.address);
      take("name", options.name);
      take("timeout_s", options.timeout_s);
      take("silence_s", options.silence_s);
      take("answer_s", options.answer_s);
      take("lease_s", options.lease_s);
      take("status_only", options.status_only);
      take("features", features);
      take("buffer_bytes", buffer_bytes);
      take("server_key", options.server_key);
      take("public_key", options.public_key);
      take("secret_key", options.secret_key);
      if (features) options.features = std::move(*features);
      if (buffer_bytes < 0) refuse("invalid_value", " is below 0");
      if (buffer_bytes > 0) options.buffer_bytes = static_cast<std::size_t>(buffer_bytes);
    } catch (const hearth::ConnectionFailed&) {
      refuse("invalid_value", " has another type");
    }
    if (!known) refuse("unsupported_option", " is not an option of a client");
  }
  return options;
}

/// An event as C sees it: pointers into an event of C++, which has to outlive it.
class EventView {
 public:
  explicit EventView(const hearth::Event& event) {
    std::visit([this](const auto& one) { show(one); }, event);
  }
  EventView(const EventView&) = delete;
  EventView& operator=(const EventView&) = delete;

  const hearth_event* get() const { return &event_; }

 private:
  void show_raw(std::int32_t type, const std::string& raw) {
    event_.type = type;
    event_.raw = reinterpret_cast<const std::uint8_t*>(raw.data());
    event_.raw_size = raw.size();
  }
  void show(const hearth::Accepted& accepted) {
    show_raw(HEARTH_ACCEPTED, accepted.raw);
    event_.prompt_tokens = accepted.prompt_tokens;
    event_.request = accepted.request.c_str();
  }
  void show(const hearth::Delta& delta) {
    show_raw(HEARTH_DELTA, delta.raw);
    event_.seq = delta.seq;
    event_.choice = delta.choice;
    event_.text = delta.text.c_str();
    event_.text_size = delta.text.size();
    event_.reasoning = delta.reasoning.c_str();
    event_.reasoning_size = delta.reasoning.size();
    event_.tokens = delta.tokens.data();
    event_.token_count = delta.tokens.size();
    for (const auto& piece : delta.tool_calls) {
      calls_.push_back(
          {piece.index, piece.id.c_str(), piece.name.c_str(), piece.arguments.c_str()});
    }
    event_.calls = calls_.data();
    event_.call_count = calls_.size();
  }
  void show(const hearth::Done& done) {
    show_raw(HEARTH_DONE, done.raw);
    usage_ = c_usage(done.usage);
    event_.reason = done.reason.c_str();
    event_.stop = done.stop.c_str();
    event_.usage = &usage_;
  }
  void show(const hearth::Failure& failure) {
    event_.type = HEARTH_FAILED;
    error_ = c_error(failure);
    event_.error = &error_;
  }

  hearth_event event_{};
  std::vector<hearth_call> calls_;
  hearth_usage usage_{};
  hearth_error error_{};
};

}  // namespace

struct hearth_client {
  hearth::Client client;
};

struct hearth_generation {
  hearth::Generation generation;
  std::optional<hearth::Event> event;
  std::optional<EventView> view;
};

const char* hearth_version(void) { return HEARTH_VERSION; }

void hearth_free(void* memory) { std::free(memory); }

int hearth_client_new(const char* options_json, hearth_client** client, hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    *client = nullptr;
    *client = new hearth_client{hearth::Client(options_of(options_json))};
  });
}

void hearth_client_close(hearth_client* client) {
  if (client) guarded(nullptr, [&] { client->client.close(); });
}

void hearth_client_free(hearth_client* client) { delete client; }

int hearth_connect(hearth_client* client, char** welcome_json, hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    const auto welcome = client->client.connect();
    if (welcome_json) *welcome_json = given_away(hearth::decode(welcome.raw).json());
  });
}

int hearth_status(hearth_client* client, char** report_json, hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    require(report_json, "report_json is NULL");
    *report_json = given_away(Value(client->client.status().fields).json());
  });
}

int hearth_tokenize(hearth_client* client, const char* request_json, const hearth_frame* frames,
                    size_t frame_count, int64_t** tokens, size_t* token_count,
                    hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    require(tokens, "tokens is NULL");
    require(token_count, "token_count is NULL");
    const auto found = client->client.tokenize(request_of(request_json, frames, frame_count));
    *tokens = given_away(found.data(), found.size());
    *token_count = found.size();
  });
}

int hearth_detokenize(hearth_client* client, const int64_t* tokens, size_t token_count, char** text,
                      size_t* text_size, hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    require(text, "text is NULL");
    if (token_count > 0) require(tokens, "tokens is NULL");
    const std::string found = client->client.detokenize({tokens, tokens + token_count});
    *text = given_away(found);
    if (text_size) *text_size = found.size();
  });
}

int hearth_generate(hearth_client* client, const char* request_json, const hearth_frame* frames,
                    size_t frame_count, hearth_callback callback, void* user,
                    hearth_generation** generation, hearth_error* error) {
  return guarded(error, [&] {
    require(client, "client is NULL");
    require(generation, "generation is NULL");
    hearth::Callback forward;
    if (callback) {
      forward = [callback, user](const hearth::Event& event) {
        callback(EventView(event).get(), user);
      };
    }
    *generation = new hearth_generation{
        client->client.generate(request_of(request_json, frames, frame_count), std::move(forward)),
        {},
        {}};
  });
}

int hearth_next(hearth_generation* generation, int timeout_ms, const hearth_event** event,
                hearth_error* error) {
  return guarded(error, [&] {
    require(generation, "generation is NULL");
    require(event, "event is NULL");
    *event = nullptr;
    generation->view.reset();
    using Milliseconds = std::chrono::milliseconds;
    generation->event = generation->generation.next_event(
        timeout_ms < 0 ? std::nullopt : std::optional(Milliseconds(timeout_ms)));
    if (generation->event) *event = generation->view.emplace(*generation->event).get();
  });
}

int hearth_ended(const hearth_generation* generation) {
  return generation && generation->generation.ended() ? 1 : 0;
}

int hearth_descriptor(hearth_generation* generation) {
  int found = -1;
  guarded(nullptr, [&] {
    require(generation, "generation is NULL");
    found = generation->generation.descriptor();
  });
  return found;
}

void hearth_cancel(hearth_generation* generation) {
  if (generation) guarded(nullptr, [&] { generation->generation.cancel(); });
}

void hearth_generation_free(hearth_generation* generation) { delete generation; }
