// A client of the Hearth daemon, and the replies that it streams.
#ifndef HEARTH_CLIENT_HPP
#define HEARTH_CLIENT_HPP

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "session.hpp"

namespace hearth {

/// One reply as far as it was read.
class Reply {
 public:
  std::string text;
  std::string reasoning;
  std::vector<std::int64_t> tokens;

  void add(const Delta& delta) {
    text += delta.text;
    reasoning += delta.reasoning;
    tokens.insert(tokens.end(), delta.tokens.begin(), delta.tokens.end());
    for (const auto& piece : delta.tool_calls) {
      CallPiece& call = calls_[piece.index];
      call.id += piece.id;
      call.name += piece.name;
      call.arguments += piece.arguments;
    }
  }
  /// The calls that are whole, in their order: `max_tokens` may have cut the last one.
  std::vector<ToolCall> tool_calls() const {
    std::vector<ToolCall> whole;
    for (const auto& [index, call] : calls_) {
      try {
        const Value arguments = Value::parse(call.arguments);
        if (const auto* map = arguments.get_if<Value::Object>()) {
          whole.push_back({call.id, call.name, *map});
        }
      } catch (const RequestRefused&) {
        continue;
      }
    }
    return whole;
  }
  /// The turn that this reply is in a conversation; throws RequestRefused (reply_empty) where it
  /// has neither text nor a whole call, as no daemon takes an empty turn.
  Message message() const {
    Message turn = Message::assistant(text);
    turn.reasoning = reasoning;
    turn.tool_calls = tool_calls();
    if (text.empty()) {
      if (turn.tool_calls.empty()) {
        raise(detail::refusal("reply_empty", "the reply has no text and no whole call"));
      }
      turn.content.reset();
    }
    return turn;
  }

 private:
  std::map<std::int64_t, CallPiece> calls_;
};

/// A stream of deltas, of one reader at a time; `cancel` is for any thread. Destroyed before its
/// end it is cancelled.
class Generation {
 public:
  Generation(Generation&&) noexcept = default;
  Generation& operator=(Generation&& other) noexcept {
    std::swap(session_, other.session_);
    std::swap(exchange_, other.exchange_);
    std::swap(seen_, other.seen_);
    return *this;
  }
  ~Generation() {
    if (exchange_) session_->forget(exchange_);
  }

  /// Wait for the next delta; none behind the last one. Throws what ended the reply.
  std::optional<Delta> next() { return delta_by({}); }
  /// The same for `timeout` at most: none also when nothing came, and `ended` tells which.
  std::optional<Delta> next(std::chrono::milliseconds timeout) {
    return delta_by(within(timeout));
  }
  /// Wait for the next event of any kind for `timeout` at most; a failure is returned, not thrown.
  std::optional<Event> next_event(std::optional<std::chrono::milliseconds> timeout = {}) {
    return event_by(timeout ? std::optional(within(*timeout)) : std::nullopt);
  }
  /// True once the last event was read.
  bool ended() const noexcept { return seen_->done || seen_->failure; }
  /// A descriptor to poll: readable while events wait. Read them until `next_event({0})` has none.
  int descriptor() { return session_->descriptor(exchange_); }
  /// Ask the daemon to end it; the stream then ends with the reason `cancelled`.
  void cancel() { session_->cancel(exchange_); }

  /// Read to the end; the whole text of the first reply.
  const std::string& text() {
    result();
    return reply().text;
  }
  /// Read to the end; reason and usage.
  const Done& result() {
    while (next()) continue;
    return *seen_->done;
  }
  /// Read to the end; the turn to go on with in a conversation.
  Message message() {
    result();
    return reply().message();
  }

  /// The id of the request on its connection.
  const std::string& id() const noexcept { return exchange_->id; }
  /// The daemon's notice that the request is queued, once it was read.
  const std::optional<Accepted>& accepted() const noexcept { return seen_->accepted; }
  /// Reason and usage, once they were read.
  const std::optional<Done>& done() const noexcept { return seen_->done; }
  /// A reply as far as it was read, also after a failure; of several by its number.
  const Reply& reply(std::int64_t choice = 0) const { return seen_->replies[choice]; }

  /// Input iterator over the deltas that are left.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Delta;
    using difference_type = std::ptrdiff_t;
    using pointer = const Delta*;
    using reference = const Delta&;

    Iterator() = default;
    explicit Iterator(Generation& of) : of_(&of) { ++*this; }
    reference operator*() const { return *delta_; }
    pointer operator->() const { return &*delta_; }
    Iterator& operator++() {
      delta_ = of_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& a, const Iterator& b) {
      return a.delta_.has_value() == b.delta_.has_value();
    }
    friend bool operator!=(const Iterator& a, const Iterator& b) { return !(a == b); }

   private:
    Generation* of_ = nullptr;
    std::optional<Delta> delta_;
  };
  Iterator begin() { return Iterator(*this); }
  Iterator end() { return {}; }

 private:
  friend class Client;
  struct Seen {
    std::optional<Accepted> accepted;
    std::map<std::int64_t, Reply> replies;
    std::optional<Done> done;
    std::optional<Failure> failure;
  };

  Generation(std::shared_ptr<detail::Session> session, detail::Session::Handle exchange)
      : session_(std::move(session)),
        exchange_(std::move(exchange)),
        seen_(std::make_unique<Seen>()) {}

  static detail::Clock::time_point within(std::chrono::milliseconds timeout) {
    return detail::Clock::now() + detail::seconds(std::chrono::duration<double>(timeout).count());
  }
  std::optional<Event> event_by(std::optional<detail::Clock::time_point> limit) {
    auto event = session_->next(exchange_, limit);
    if (!event) return event;
    if (const auto* delta = std::get_if<Delta>(&*event)) {
      seen_->replies[delta->choice].add(*delta);
    } else if (const auto* accepted = std::get_if<Accepted>(&*event)) {
      seen_->accepted = *accepted;
    } else if (const auto* done = std::get_if<Done>(&*event)) {
      seen_->done = *done;
    } else {
      seen_->failure = std::get<Failure>(*event);
    }
    return event;
  }
  std::optional<Delta> delta_by(std::optional<detail::Clock::time_point> limit) {
    while (!ended()) {
      auto event = event_by(limit);
      if (!event) return {};
      if (auto* delta = std::get_if<Delta>(&*event)) return std::move(*delta);
    }
    if (seen_->failure) raise(*seen_->failure);
    return {};
  }

  std::shared_ptr<detail::Session> session_;
  detail::Session::Handle exchange_;
  std::unique_ptr<Seen> seen_;
};

/// A client of one daemon, for any number of threads. A session is opened by the first request and
/// by the first one after a loss. It does not survive a fork.
class Client {
 public:
  explicit Client(ClientOptions options = {})
      : options_(std::move(options)), address_(detail::resolve_address(options_.address)) {
    const auto above_0 = [](double value, const char* name) {
      if (!(value > 0)) {
        raise(detail::refusal("invalid_value", std::string(name) + " must be above 0", name));
      }
    };
    above_0(options_.silence_s, "silence_s");
    above_0(options_.answer_s, "answer_s");
    above_0(options_.timeout_s.value_or(usual_timeout_s), "timeout_s");
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client() { close(); }

  /// Open a session, unless one is open; throws ConnectionFailed.
  Welcome connect() { return session()->welcome(); }

  /// Start a reply, which `Generation` streams.
  Generation generate(const GenerateRequest& request) { return generate(wire(request)); }
  /// Start a reply whose events go to `callback`; the `Generation` then reads nothing, and no call
  /// follows its destruction.
  Generation generate(const GenerateRequest& request, Callback callback) {
    return generate(wire(request), std::move(callback));
  }
  /// The same by names on the wire, which the daemon checks.
  Generation generate(const WireRequest& request, Callback callback = {}) {
    auto [open, exchange] = send("generate", "done", request, std::move(callback));
    return {std::move(open), std::move(exchange)};
  }

  /// Token ids of a raw text.
  std::vector<std::int64_t> tokenize(std::string text) {
    TokenizeRequest request;
    request.text = std::move(text);
    return tokenize(request);
  }
  std::vector<std::int64_t> tokenize(const TokenizeRequest& request) {
    return tokenize(wire(request));
  }
  std::vector<std::int64_t> tokenize(const WireRequest& request) {
    std::vector<std::int64_t> tokens;
    const Value reply = ask("tokenize", "tokens", request);
    detail::FieldReader(reply, "map").required("tokens", tokens);
    return tokens;
  }
  /// The text of token ids.
  std::string detokenize(const std::vector<std::int64_t>& tokens) {
    std::string text;
    const Value reply =
        ask("detokenize", "text", {{{"tokens", Value::Array(tokens.begin(), tokens.end())}}, {}});
    detail::FieldReader(reply, "map").required("text", text);
    return text;
  }
  StatusReport status() { return answer<StatusReport>(ask("status", "status_report", {})); }

  /// End the session: what is open fails with client_closed, and so does what follows.
  void close() {
    std::vector<std::shared_ptr<detail::Session>> sessions;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      sessions.swap(sessions_);
    }
    for (const auto& one : sessions) one->close();
  }

 private:
  static constexpr double usual_timeout_s = 5;
  static constexpr int most_tries = 3;

  /// The session that is open, or a new one.
  std::shared_ptr<detail::Session> session() {
    using detail::Clock;
    std::shared_ptr<detail::Session> made;
    {
      const std::lock_guard lock(mutex_);
      if (closed_) {
        raise(detail::broken("client_closed", "this client was closed: make another one"));
      }
      if (!sessions_.empty() && !sessions_.back()->lost()) {
        made = sessions_.back();
      } else {
        forget_ended();
        const auto timeout = detail::seconds(options_.timeout_s.value_or(usual_timeout_s));
        made = std::make_shared<detail::Session>(options_, address_, numbers_, timeout,
                                                 patience(timeout));
        made->start();
        sessions_.push_back(made);
      }
    }
    made->await_welcome();
    return made;
  }
  /// Time that a daemon which is not there is waited for.
  detail::Clock::duration patience(detail::Clock::duration timeout) const {
    if (options_.timeout_s) return timeout;
    return lost_at_ == detail::Clock::time_point{} ? detail::Clock::duration::zero()
                                                   : lost_at_ + timeout - detail::Clock::now();
  }
  void forget_ended() {
    for (auto one = sessions_.begin(); one != sessions_.end();) {
      lost_at_ = std::max(lost_at_, (*one)->lost_at());
      one = (*one)->over() ? sessions_.erase(one) : std::next(one);
    }
  }
  /// Send a request on the session that is open, or on another where that is lost at this moment.
  std::pair<std::shared_ptr<detail::Session>, detail::Session::Handle> send(
      const char* kind, const char* ends_with, const WireRequest& request, Callback callback) {
    const auto shared =
        callback ? std::make_shared<const Callback>(std::move(callback)) : nullptr;
    for (int tries = 0; tries < most_tries; ++tries) {
      auto open = session();
      if (auto exchange = open->request(kind, ends_with, request, shared)) return {open, exchange};
    }
    raise(detail::broken("connection_lost", "sessions with the daemon are lost as they begin"));
  }
  Value ask(const char* kind, const char* ends_with, const WireRequest& request) {
    const auto [open, exchange] = send(kind, ends_with, request, {});
    return open->reply(exchange, detail::seconds(options_.answer_s));
  }

  const ClientOptions options_;
  const std::string address_;
  std::atomic<std::uint64_t> numbers_{0};
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::shared_ptr<detail::Session>> sessions_;  // The last one may be open.
  detail::Clock::time_point lost_at_{};
};

}  // namespace hearth

#endif
