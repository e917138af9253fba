// The driver of the conformance suite, which calls the C ABI alone; messages that this hands on are
// read by the C++ client's reader.
#include <hearth.h>
#include <hearth/value.hpp>

#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Json = nlohmann::ordered_json;

std::mutex output;

void report(const char* event, const std::string& as, const Json& fields) {
  Json line{{"event", event}};
  if (!as.empty()) line["as"] = as;
  line.update(fields);
  const std::lock_guard lock(output);
  std::cout << line.dump() << std::endl;
}

Json usage_of(const hearth_usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"reasoning_tokens", usage.reasoning_tokens},
          {"cached_tokens", usage.cached_tokens},
          {"queue_ms", usage.queue_ms},
          {"prefill_ms", usage.prefill_ms},
          {"decode_ms", usage.decode_ms}};
}

void report(const hearth_error& error, const std::string& as) {
  static const char* const kinds[] = {"", "request", "service", "connection", "client"};
  Json fields{{"code", error.code}, {"message", error.message}, {"kind", kinds[error.kind]}};
  if (error.field[0] != '\0') fields["field"] = error.field;
  if (error.retry_after_s >= 0) fields["retry_after_s"] = error.retry_after_s;
  if (error.has_usage) fields["usage"] = usage_of(error.usage);
  report("failed", as, fields);
}

const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string from_base64(const std::string& text) {
  std::string bytes;
  unsigned bits = 0, held = 0;
  for (const char one : text) {
    const auto value = letters.find(one);
    if (value == letters.npos) continue;
    bits = bits << 6 | static_cast<unsigned>(value);
    if ((held += 6) >= 8) bytes += static_cast<char>(bits >> (held -= 8));
  }
  return bytes;
}

void report(const hearth_event& event, const std::string& as) {
  static const char* const names[] = {"", "accepted", "delta", "done"};
  if (event.type == HEARTH_FAILED) return report(*event.error, as);
  // nlohmann's parser takes no names but text, which unknown fields may have.
  const std::string_view raw(reinterpret_cast<const char*>(event.raw), event.raw_size);
  Json fields = Json::parse(hearth::decode(raw).json());
  fields.erase("t");
  fields.erase("id");
  if (event.type == HEARTH_ACCEPTED) {
    fields["prompt_tokens"] = event.prompt_tokens;
  } else if (event.type == HEARTH_DELTA) {
    // What the struct tells in place of the message's own.
    fields["text"] = std::string(event.text, event.text_size);
    fields["tokens"] = std::vector<std::int64_t>(event.tokens, event.tokens + event.token_count);
    for (std::size_t i = 0; i < event.call_count; ++i) {
      const hearth_call& call = event.calls[i];
      fields["tool_calls"][i] = {{"index", call.index}, {"arguments", call.arguments}};
      if (call.id[0] != '\0') fields["tool_calls"][i]["id"] = call.id;
      if (call.name[0] != '\0') fields["tool_calls"][i]["name"] = call.name;
    }
  } else if (event.type == HEARTH_DONE) {
    fields["reason"] = event.reason;
    fields["usage"] = usage_of(*event.usage);
  }
  report(names[event.type], as, fields);
}

/// A request as it goes to the library, with its pictures beside it.
struct Request {
  explicit Request(Json fields) {
    take_pictures(fields);
    json = fields.dump();
    for (const auto& one : pictures) frames.push_back({one.data(), one.size()});
  }
  void take_pictures(Json& value) {
    if (value.is_object() && value.contains("data") &&
        (value.contains("format") || value.contains("encoding"))) {
      pictures.push_back(from_base64(value["data"].get<std::string>()));
      value.erase("data");
      value["frame"] = pictures.size();
    } else if (value.is_structured()) {
      for (auto& one : value) take_pictures(one);
    }
  }
  std::string json;
  std::vector<std::string> pictures;
  std::vector<hearth_frame> frames;
};

class Driver {
 public:
  explicit Driver(std::string address) : address_(std::move(address)) { make(Json::object()); }
  ~Driver() {
    for (auto* one : clients_) hearth_client_close(one);
    for (const auto& [as, one] : unread_) read(one, as);
    for (auto& one : threads_) one.join();
    for (const auto& [as, one] : generations_) hearth_generation_free(one);
    for (auto* one : clients_) hearth_client_free(one);
    report("closed", "", Json::object());
  }

  void obey(const Json& command) {
    const std::string name = command.at("do"), as = command.value("as", "");
    if (name == "connect") {
      connect(command);
    } else if (name == "generate") {
      generate(command, as);
    } else if (name == "read") {
      const auto found = unread_.find(as);
      if (found == unread_.end()) return;
      read(found->second, as);
      unread_.erase(found);
    } else if (name == "cancel") {
      const auto found = generations_.find(as);
      if (found != generations_.end()) hearth_cancel(found->second);
    } else {
      threads_.emplace_back([client = clients_.back(), name, command, as] {
        ask(client, name, command, as);
      });
    }
  }

 private:
  void make(Json options) {
    options["address"] = address_;
    hearth_client* made = nullptr;
    hearth_error error{};
    if (hearth_client_new(options.dump().c_str(), &made, &error) != HEARTH_OK) {
      return report(error, "");
    }
    if (!clients_.empty()) hearth_client_close(clients_.back());
    clients_.push_back(made);
  }
  void connect(Json options) {
    options.erase("do");
    if (options != last_options_) make(last_options_ = options);
    char* welcome = nullptr;
    hearth_error error{};
    if (hearth_connect(clients_.back(), &welcome, &error) != HEARTH_OK) return report(error, "");
    report("connected", "", {{"welcome", Json::parse(welcome)}});
    hearth_free(welcome);
  }
  void generate(const Json& command, const std::string& as) {
    const Request request(command.at("request"));
    hearth_generation* generation = nullptr;
    hearth_error error{};
    if (hearth_generate(clients_.back(), request.json.c_str(), request.frames.data(),
                        request.frames.size(), nullptr, nullptr, &generation,
                        &error) != HEARTH_OK) {
      return report(error, as);
    }
    generations_.emplace(as, generation);
    if (command.value("read", true)) {
      read(generation, as);
    } else {
      unread_.emplace(as, generation);
    }
  }
  void read(hearth_generation* generation, const std::string& as) {
    threads_.emplace_back([generation, as] {
      const hearth_event* event = nullptr;
      hearth_error error{};
      while (hearth_next(generation, -1, &event, &error) == HEARTH_OK && event) report(*event, as);
    });
  }
  static void ask(hearth_client* client, const std::string& what, const Json& command,
                  const std::string& as) {
    hearth_error error{};
    int failed = HEARTH_OK;
    if (what == "tokenize") {
      const Request request(command.at("request"));
      std::int64_t* tokens = nullptr;
      std::size_t count = 0;
      failed = hearth_tokenize(client, request.json.c_str(), request.frames.data(),
                               request.frames.size(), &tokens, &count, &error);
      if (!failed) {
        report("tokens", as, {{"tokens", std::vector<std::int64_t>(tokens, tokens + count)}});
      }
      hearth_free(tokens);
    } else if (what == "detokenize") {
      const std::vector<std::int64_t> tokens = command.at("request").at("tokens");
      char* text = nullptr;
      std::size_t size = 0;
      failed = hearth_detokenize(client, tokens.data(), tokens.size(), &text, &size, &error);
      if (!failed) report("text", as, {{"text", std::string(text, size)}});
      hearth_free(text);
    } else {
      char* told = nullptr;
      failed = hearth_status(client, &told, &error);
      if (!failed) {
        Json fields = Json::parse(told);
        fields.erase("t");
        fields.erase("id");
        report("status_report", as, fields);
      }
      hearth_free(told);
    }
    if (failed) report(error, as);
  }

  const std::string address_;
  Json last_options_ = Json::object();
  std::vector<hearth_client*> clients_;  // The last one is asked.
  std::map<std::string, hearth_generation*> generations_, unread_;
  std::vector<std::thread> threads_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: driver ADDRESS\n";
    return 2;
  }
  Driver driver(arguments[1]);
  for (std::string line; std::getline(std::cin, line);) {
    const Json command = Json::parse(line);
    if (command.at("do") == "close") break;
    driver.obey(command);
  }
}
