// The driver of the conformance suite: commands in, events out, one JSON object a line.
#include <array>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "forms.hpp"

namespace {

using hearth::Value;
using Object = Value::Object;

std::mutex output;

void report(const char* event, const Value* as, Object fields) {
  Object line{{"event", event}};
  if (as) line.emplace_back("as", *as);
  std::move(fields.begin(), fields.end(), std::back_inserter(line));
  const std::lock_guard lock(output);
  std::cout << Value(std::move(line)).json() << std::endl;
}

void report(const hearth::Failure& failure, const Value* as) {
  static constexpr std::array kinds{"request", "service", "connection"};
  Object fields = forms::fields_of(failure);
  fields.emplace_back("kind", kinds.at(static_cast<std::size_t>(failure.kind)));
  report("failed", as, std::move(fields));
}

struct Reporter {
  const Value* as;
  void operator()(const hearth::Accepted& one) { report("accepted", as, forms::fields_of(one)); }
  void operator()(const hearth::Delta& one) { report("delta", as, forms::fields_of(one)); }
  void operator()(const hearth::Done& one) { report("done", as, forms::fields_of(one)); }
  void operator()(const hearth::Failure& one) { report(one, as); }
};

hearth::Bytes from_base64(const std::string& text) {
  static const std::string letters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  hearth::Bytes bytes;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char one : text) {
    const auto value = letters.find(one);
    if (value == letters.npos) continue;
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    if ((held += 6) >= 8) bytes.push_back(static_cast<std::uint8_t>(bits >> (held -= 8) & 255));
  }
  return bytes;
}

hearth::Image picture(const Value& part) {
  return forms::picture(part, from_base64(forms::text_or(part, "data")));
}

class Driver {
 public:
  explicit Driver(std::string address) : address_(std::move(address)) { make({}); }
  ~Driver() {
    client_->close();
    for (auto& [as, one] : unread_) read(one, as);
    for (auto& one : threads_) one.join();
    report("closed", nullptr, {});
  }

  void obey(const Value& command) {
    const std::string name = forms::text_or(command, "do");
    const Value* as = command.find("as");
    try {
      if (name == "connect") {
        connect(command);
      } else if (name == "generate") {
        generate(command, *as);
      } else if (name == "read") {
        auto found = unread_.extract(forms::text(*as));
        if (found) read(found.mapped(), found.key());
      } else if (name == "cancel") {
        const auto found = generations_.find(forms::text(*as));
        if (found != generations_.end()) found->second->cancel();
      } else {
        ask(name, command);
      }
    } catch (const hearth::Error& error) {
      report(error.failure(), as);
    }
  }

 private:
  using Generation = std::shared_ptr<hearth::Generation>;

  void make(hearth::ClientOptions options) {
    options.address = address_;
    client_ = std::make_shared<hearth::Client>(std::move(options));
  }
  void connect(const Value& command) {
    const auto number = [&](const char* name) {
      const Value* found = command.find(name);
      return found ? std::optional(forms::number(*found)) : std::nullopt;
    };
    if (command != last_connect_) {
      hearth::ClientOptions options;
      options.name = forms::text_or(command, "name");
      options.timeout_s = number("timeout_s");
      options.lease_s = number("lease_s");
      options.silence_s = number("silence_s").value_or(options.silence_s);
      if (const Value* features = command.find("features")) {
        options.features.clear();
        for (const auto& one : forms::list(*features)) options.features.push_back(forms::text(one));
      }
      make(std::move(options));
      last_connect_ = command;
    }
    report("connected", nullptr, {{"welcome", forms::fields_of(client_->connect())}});
  }
  void generate(const Value& command, const Value& as) {
    const Value* reads = command.find("read");
    const auto request = forms::generate(*command.find("request"), picture);
    auto started = std::make_shared<hearth::Generation>(client_->generate(request));
    generations_[forms::text(as)] = started;
    if (reads && *reads == Value(false)) {
      unread_[forms::text(as)] = std::move(started);
    } else {
      read(std::move(started), forms::text(as));
    }
  }
  void read(Generation generation, std::string as) {
    threads_.emplace_back([generation = std::move(generation), as = Value(std::move(as))] {
      while (auto event = generation->next_event()) std::visit(Reporter{&as}, *event);
    });
  }
  void ask(const std::string& what, const Value& command) {
    threads_.emplace_back([what, command, client = client_] {
      const Value* as = command.find("as");
      const Value* request = command.find("request");
      try {
        if (what == "tokenize") {
          const auto tokens = client->tokenize(forms::tokenize(*request, picture));
          report("tokens", as, {{"tokens", Value::Array(tokens.begin(), tokens.end())}});
        } else if (what == "detokenize") {
          std::vector<std::int64_t> tokens;
          for (const auto& one : forms::list(*request->find("tokens"))) {
            tokens.push_back(forms::integer(one));
          }
          report("text", as, {{"text", client->detokenize(tokens)}});
        } else {
          report("status_report", as, client->status().fields);
        }
      } catch (const hearth::Error& error) {
        report(error.failure(), as);
      }
    });
  }

  const std::string address_;
  std::shared_ptr<hearth::Client> client_;
  Value last_connect_;
  std::unordered_map<std::string, Generation> generations_, unread_;
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
    const Value command = Value::parse(line);
    if (forms::text_or(command, "do") == "close") break;
    driver.obey(command);
  }
}
