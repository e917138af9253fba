// Sessions with a scripted ROUTER.
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "checks.hpp"
#include "forms.hpp"

namespace {

using namespace std::chrono_literals;
using checks::code_of;
using hearth::Client;
using hearth::ClientOptions;
using hearth::Value;
using Object = Value::Object;

/// A ROUTER in a folder of its own that says what a test tells it to.
class Peer {
 public:
  Peer() : folder_("/tmp/hearth-XXXXXX"), router_(context_, zmq::socket_type::router) {
    if (!::mkdtemp(folder_.data())) throw std::runtime_error("no folder");
    router_.set(zmq::sockopt::linger, 0);
    router_.set(zmq::sockopt::rcvtimeo, 20000);
    router_.bind("ipc://" + path());
  }
  ~Peer() {
    ::unlink(path().c_str());
    ::rmdir(folder_.c_str());
  }
  std::string path() const { return folder_ + "/s"; }
  ClientOptions options() const {
    ClientOptions options;
    options.address = path();
    return options;
  }

  /// The next message of any kind.
  Value take_any() {
    frames.clear();
    zmq::message_t routing_id, frame;
    if (!router_.recv(routing_id)) throw std::runtime_error("nothing came");
    routing_id_ = routing_id.to_string();
    do {
      if (!router_.recv(frame)) throw std::runtime_error("half a message");
      frames.push_back(frame.to_string());
    } while (frame.more());
    return hearth::decode(frames.front());
  }
  /// The next message but leases, which are answered.
  Value take() {
    while (true) {
      Value message = take_any();
      if (forms::text_or(message, "t") != "lease") return message;
      say("{\"t\": \"leased\", \"seconds\": 30}");
    }
  }
  /// The next message, whose type is `kind`; its id.
  std::string take(const std::string& kind) {
    const Value message = take();
    CHECK_IN(forms::text_or(message, "t") == kind, message.json());
    return forms::text_or(message, "id");
  }
  void say(const std::string& json) { send(hearth::encode(Value::parse(json))); }
  void say(const std::string& id, const std::string& json) {
    Value message = Value::parse(json);
    Object fields = forms::as<Object>(message);
    fields.emplace_back("id", id);
    send(hearth::encode(fields));
  }
  void send(const std::string& bytes) {
    router_.send(zmq::buffer(routing_id_), zmq::send_flags::sndmore);
    router_.send(zmq::buffer(bytes));
  }
  void delta(const std::string& id, int seq, const std::string& text) {
    say(id, R"({"t": "delta", "mood": "fine", "seq": )" + std::to_string(seq) + R"(, "text": ")" +
                text + R"(", "tokens": [1]})");
  }
  void done(const std::string& id) {
    say(id, R"({"t": "done", "reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 2}})");
  }
  void welcome(const std::string& epoch = "first") {
    say(R"({"t": "welcome", "proto": )" + proto + R"(, "server": "scripted", "epoch": ")" + epoch +
        R"(", "limits": {"frame_bytes": 4096, "frames": 4, "requests_per_client": 8,
            "prompt_tokens": 10, "total_tokens": 20, "queued_requests": 9, "queued_tokens": 9,
            "lease_s": )" + lease_s + R"(, "images": 2, "image_bytes": 100,
            "request_image_bytes": 150}})");
  }
  void greet(Client& client) {
    auto connected = std::async(std::launch::async, [&] { return client.connect(); });
    take("hello");
    welcome();
    CHECK(connected.get().server == "scripted");
  }
  /// The whole of a reply to the next request.
  void serve() {
    const std::string id = take("generate");
    say(id, R"({"t": "accepted", "prompt_tokens": 1})");
    delta(id, 0, "he");
    delta(id, 1, "llo");
    done(id);
  }

  std::vector<std::string> frames;
  std::string lease_s = "30", proto = "1";

 private:
  std::string folder_;
  zmq::context_t context_;
  zmq::socket_t router_;
  std::string routing_id_;
};

hearth::GenerateRequest tell() { return hearth::GenerateRequest::ask("Tell"); }

void test_a_stream() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto reply = client.generate(tell());
  CHECK(!reply.next(1ms) && !reply.ended());
  const std::string id = peer.take("generate");
  peer.say(id, R"({"t": "accepted", "prompt_tokens": 1, "request": "r1"})");
  peer.say(id, R"({"t": "of_tomorrow", "text": "x"})");
  peer.delta(id, 0, "he");
  peer.delta(id, 1, "llo");
  peer.done(id);
  peer.done(id);
  peer.delta(id, 7, "late");
  std::string text;
  for (const auto& delta : reply) {
    text += delta.text;
    CHECK(hearth::decode(delta.raw).find("mood"));
  }
  CHECK(text == "hello" && reply.text() == "hello" && reply.ended());
  CHECK(reply.accepted()->request == "r1" && reply.result().usage.completion_tokens == 2);
  CHECK(!reply.next() && !reply.next_event());
  auto other = client.generate(tell());
  peer.serve();
  CHECK(other.text() == "hello");
}

void test_cancels() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto reply = client.generate(tell());
  const std::string id = peer.take("generate");
  reply.cancel();
  CHECK(peer.take("cancel") == id);
  peer.say(id, R"({"t": "done", "reason": "cancelled", "usage": {"prompt_tokens": 0, "completion_tokens": 0}})");
  CHECK(reply.result().reason == "cancelled");
  reply.cancel();
  std::string forgotten;
  {
    const auto unread = client.generate(tell());
    forgotten = peer.take("generate");
  }
  CHECK(peer.take("cancel") == forgotten);
  peer.done(forgotten);
  auto other = client.generate(tell());
  peer.serve();
  CHECK(other.text() == "hello");
}

void test_violations() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto a = client.generate(tell()), b = client.generate(tell()), c = client.generate(tell());
  const std::string ids[] = {peer.take("generate"), peer.take("generate"), peer.take("generate")};
  peer.delta(ids[0], 0, "he");
  peer.delta(ids[0], 2, "o");
  CHECK(code_of([&] { a.text(); }) == "protocol_violation");
  CHECK(a.reply().text == "he");
  peer.say(ids[1], R"({"t": "tokens", "tokens": [1]})");
  CHECK(code_of([&] { b.text(); }) == "protocol_violation");
  peer.say(ids[2], R"({"t": "error", "code": "of_tomorrow", "message": "No.", "retry_after_s": 2})");
  try {
    c.text();
    CHECK(false);
  } catch (const hearth::ServiceFailed& error) {
    CHECK(error.code() == "of_tomorrow" && error.retry_after_s() == 2.0);
  }
  auto d = client.generate(tell()), e = client.generate(tell());
  peer.take("generate");
  peer.take("generate");
  peer.send("\xc1");
  CHECK(code_of([&] { d.text(); }) == "protocol_violation");
  CHECK(code_of([&] { e.text(); }) == "protocol_violation");
}

void test_losses() {
  Peer peer;
  auto options = peer.options();
  options.silence_s = 0.3;
  Client client(options);
  peer.greet(client);
  auto a = client.generate(tell());
  const std::string old = peer.take("generate");
  CHECK(code_of([&] { a.text(); }) == "connection_timeout");
  auto again = std::async(std::launch::async, [&] { return client.generate(tell()); });
  for (Value message = peer.take(); forms::text_or(message, "t") != "hello"; message = peer.take()) {
  }
  peer.say(R"({"t": "error", "code": "hello_required", "message": "Who?"})");
  peer.welcome("second");
  auto b = again.get();
  const std::string id = peer.take("generate");
  CHECK(id != old);
  peer.delta(old, 0, "late");
  peer.welcome("third");
  CHECK(code_of([&] { b.text(); }) == "connection_lost");
}

void test_a_daemon_that_dies() {
  auto peer = std::make_unique<Peer>();
  Client client(peer->options());
  peer->greet(client);
  auto reply = client.generate(tell());
  const std::string id = peer->take("generate");
  peer->delta(id, 0, "he");
  CHECK(reply.next()->text == "he");
  peer.reset();
  CHECK(code_of([&] { reply.text(); }) == "connection_lost");
}

void test_connecting() {
  Peer peer;
  ClientOptions options = peer.options();
  options.timeout_s = 0.1;
  CHECK(code_of([&] { Client(options).connect(); }) == "connection_timeout");
  options.silence_s = 0.01;
  CHECK(code_of([&] { Client(options).connect(); }) == "connection_timeout");
  options.silence_s = 0;
  CHECK(code_of([&] { Client(options).connect(); }) == "invalid_value");
  options = {};
  options.address = peer.path() + "no";
  CHECK(code_of([&] { Client(options).connect(); }) == "connection_refused");
}

void test_an_old_daemon_and_one_that_is_full() {
  Peer peer;
  auto options = peer.options();
  options.lease_s = 40;
  Client client(options);
  auto connected = std::async(std::launch::async, [&] { return client.connect(); });
  const Value hello = peer.take();
  CHECK(hello.find("features") && forms::number(*hello.find("lease_s")) == 40);
  peer.say(R"({"t": "error", "code": "unsupported_option", "field": "features", "message": "No."})");
  CHECK(!peer.take().find("features"));
  peer.say(R"({"t": "error", "code": "too_many_clients", "message": "Full.", "retry_after_s": 1})");
  CHECK(code_of([&] { connected.get(); }) == "too_many_clients");
}

void test_leases() {
  Peer peer;
  peer.lease_s = "0.3";
  Client client(peer.options());
  peer.greet(client);
  auto status = std::async(std::launch::async, [&] { return client.status(); });
  const std::string id = peer.take("status");
  auto reply = client.generate(tell());
  const std::string unread = peer.take("generate");
  for (int seq = 0; seq < 4; ++seq) {  // By the clock, whatever arrives and whoever reads it.
    peer.delta(unread, seq, "x");
    CHECK(forms::text_or(peer.take_any(), "t") == "lease");
  }
  peer.say(id, R"({"t": "status_report", "server": "s", "model": "m", "state": "of_tomorrow",
      "uptime_s": 1, "clients": 1, "running": 0, "queued": 0, "queued_tokens": 0, "places": 2})");
  const auto report = status.get();
  CHECK(report.state == "of_tomorrow" && report.uptime_s == 1.0 && report.places == 2);
}

void test_welcomes_that_cannot_be() {
  const auto refused = [](const std::string& lease_s, const std::string& proto) {
    Peer peer;
    peer.lease_s = lease_s;
    peer.proto = proto;
    Client client(peer.options());
    auto connected = std::async(std::launch::async, [&] { return client.connect(); });
    peer.take("hello");
    peer.welcome();
    return code_of([&] { connected.get(); });
  };
  CHECK(refused("0", "1") == "protocol_violation");
  CHECK(refused("-1.5", "1") == "protocol_violation");
  CHECK(refused("30", "2") == "unsupported_protocol");
}

void test_times_of_any_length() {
  for (const auto* lease_s : {"1e-300", "1e308"}) {
    Peer peer;
    peer.lease_s = lease_s;
    auto options = peer.options();
    options.timeout_s = options.silence_s = options.answer_s = 1e300;
    Client client(options);
    peer.greet(client);
    auto reply = client.generate(tell());
    const std::string id = peer.take("generate");
    auto served = std::async(std::launch::async, [&] {
      return reply.next(std::chrono::milliseconds::max());
    });
    CHECK(served.wait_for(1ms) == std::future_status::timeout);
    peer.delta(id, 0, "x");
    CHECK(served.get()->text == "x");
  }
  hearth::ClientOptions options;
  options.timeout_s = std::nan("");
  CHECK(code_of([&] { const Client client(options); }) == "invalid_value");
}

void test_the_first_accepted_counts() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto reply = client.generate(tell());
  const std::string id = peer.take("generate");
  peer.say(id, R"({"t": "accepted", "prompt_tokens": 1})");
  peer.say(id, R"({"t": "accepted", "prompt_tokens": 2})");
  peer.done(id);
  CHECK(std::get<hearth::Accepted>(*reply.next_event()).prompt_tokens == 1);
  CHECK(std::holds_alternative<hearth::Done>(*reply.next_event()));
}

void test_callbacks() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  std::promise<std::string> heard;
  std::string text;
  auto reply = client.generate(tell(), [&](const hearth::Event& event) {
    if (const auto* delta = std::get_if<hearth::Delta>(&event)) text += delta->text;
    if (std::holds_alternative<hearth::Done>(event)) heard.set_value(text);
  });
  peer.serve();
  CHECK(heard.get_future().get() == "hello");
  CHECK(!reply.next_event(0ms));

  // From within one: cancel, another request, and the end of its own generation and client.
  std::promise<void> assigned, ended;
  auto second = std::make_unique<Client>(peer.options());
  peer.greet(*second);
  std::optional<hearth::Generation> outer, inner;
  outer = second->generate(tell(), [&](const hearth::Event& event) {
    if (!std::holds_alternative<hearth::Delta>(event)) return;
    assigned.get_future().get();
    outer->cancel();
    inner = second->generate(tell());
    outer.reset();
    second.reset();
    ended.set_value();
  });
  assigned.set_value();
  peer.delta(peer.take("generate"), 0, "x");
  ended.get_future().get();
  CHECK(code_of([&] { inner->text(); }) == "client_closed");
}

void test_a_callback_that_throws_ends_its_generation() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  int calls = 0;
  auto reply = client.generate(tell(), [&](const hearth::Event&) {
    ++calls;
    throw std::runtime_error("of the program");
  });
  auto other = client.generate(tell(), [](const hearth::Event&) { throw 7; });
  const std::string id = peer.take("generate");
  const std::string last = peer.take("generate");
  peer.delta(id, 0, "x");
  peer.delta(id, 1, "y");
  CHECK(peer.take("cancel") == id);
  peer.done(id);
  peer.done(last);
  const auto failed = [](hearth::Generation& one) {
    const auto event = one.next_event();
    return event && std::get<hearth::Failure>(*event).code == "callback_failed";
  };
  CHECK(failed(reply) && failed(other));
  CHECK(calls == 1);
  auto third = client.generate(tell());
  peer.serve();
  CHECK(third.text() == "hello");
}

void test_a_callback_of_a_loss_may_ask_again() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  std::promise<hearth::Generation> again;
  const auto lost = client.generate(tell(), [&](const hearth::Event& event) {
    CHECK(std::get<hearth::Failure>(event).code == "message_too_large");
    again.set_value(client.generate(tell()));
  });
  peer.take("generate");
  peer.say(R"({"t": "error", "code": "message_too_large", "message": "Whose?"})");
  peer.take("hello");
  peer.welcome();
  peer.serve();
  CHECK(again.get_future().get().text() == "hello");
}

void test_a_slow_reader() {
  Peer peer;
  auto options = peer.options();
  options.buffer_bytes = 500;
  Client client(options);
  peer.greet(client);
  auto slow = client.generate(tell());
  const std::string id = peer.take("generate");
  for (int seq = 0; seq < 100; ++seq) peer.delta(id, seq, "abcdefgh");
  CHECK(peer.take("cancel") == id);
  CHECK(code_of([&] { slow.text(); }) == "slow_client");
  CHECK(slow.reply().text.size() >= 8 && slow.reply().text.size() < 100);
  auto other = client.generate(tell());
  peer.serve();
  CHECK(other.text() == "hello");
}

void test_a_descriptor() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto reply = client.generate(tell());
  pollfd one{reply.descriptor(), POLLIN, 0};
  CHECK(::poll(&one, 1, 0) == 0);
  peer.serve();
  std::string text;
  while (!reply.ended()) {
    CHECK(::poll(&one, 1, 20000) == 1);
    while (auto event = reply.next_event(0ms)) {
      if (const auto* delta = std::get_if<hearth::Delta>(&*event)) text += delta->text;
    }
  }
  CHECK(text == "hello" && ::poll(&one, 1, 0) == 0);
}

void test_closing() {
  Peer peer;
  std::optional<hearth::Generation> reply;
  {
    Client client(peer.options());
    peer.greet(client);
    reply = client.generate(tell());
    peer.take("generate");
    client.close();
    peer.take("bye");
    CHECK(code_of([&] { client.status(); }) == "client_closed");
  }
  CHECK(code_of([&] { reply->text(); }) == "client_closed");
}

void test_what_is_not_sent() {
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  auto request = tell();
  request.prompt = std::string(5000, 'x');
  CHECK(code_of([&] { client.generate(request); }) == "message_too_large");
  const auto shows = [](std::vector<std::size_t> sizes) {
    std::vector<hearth::Part> parts{std::string("What?")};
    for (const auto size : sizes) {
      parts.emplace_back(hearth::Image::pixels(hearth::Bytes(size, 7), "mono8", 1, 1));
    }
    hearth::GenerateRequest asked;
    asked.messages = {hearth::Message::user(std::move(parts))};
    return asked;
  };
  CHECK(code_of([&] { client.generate(shows({1, 1, 1})); }) == "invalid_value");
  CHECK(code_of([&] { client.generate(shows({101})); }) == "image_too_large");
  CHECK(code_of([&] { client.generate(shows({90, 90})); }) == "image_too_large");
  auto reply = client.generate(shows({5, 3}));
  peer.take("generate");
  CHECK(peer.frames.size() == 3 && peer.frames[1] == std::string(5, 7) && peer.frames[2].size() == 3);
}

void test_many_threads() {
  constexpr int threads = 4, each = 25;
  Peer peer;
  Client client(peer.options());
  peer.greet(client);
  std::vector<std::future<int>> askers;
  for (int i = 0; i < threads; ++i) {
    askers.push_back(std::async(std::launch::async, [&] {
      int whole = 0;
      for (int k = 0; k < each; ++k) whole += client.generate(tell()).text() == "hello";
      return whole;
    }));
  }
  for (int i = 0; i < threads * each; ++i) peer.serve();
  for (auto& one : askers) CHECK(one.get() == each);
}

}  // namespace

int main() {
  test_a_stream();
  test_cancels();
  test_violations();
  test_losses();
  test_a_daemon_that_dies();
  test_connecting();
  test_an_old_daemon_and_one_that_is_full();
  test_leases();
  test_welcomes_that_cannot_be();
  test_times_of_any_length();
  test_the_first_accepted_counts();
  test_callbacks();
  test_a_callback_that_throws_ends_its_generation();
  test_a_callback_of_a_loss_may_ask_again();
  test_a_slow_reader();
  test_a_descriptor();
  test_closing();
  test_what_is_not_sent();
  test_many_threads();
  return checks::failures() == 0 ? 0 : 1;
}
