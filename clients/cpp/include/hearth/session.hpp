// One session with the daemon: a thread that owns the socket, and what waits for it.
#ifndef HEARTH_SESSION_HPP
#define HEARTH_SESSION_HPP

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "answer.hpp"
#include "channel.hpp"
#include "request.hpp"
#include "value.hpp"

namespace hearth {

/// What comes of a generation, in order; `Done` or `Failure` comes once and last.
using Event = std::variant<Accepted, Delta, Done, Failure>;
/// Reader of events on the client's own thread: it must not block. One that throws gets no more:
/// its generation is cancelled, and `next_event` has a Failure with the code callback_failed.
using Callback = std::function<void(const Event&)>;

namespace detail {

/// The message of a request.
inline std::string encode_request(const char* kind, const std::string& id,
                                  const Value::Object& fields) {
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  packer.pack_map(static_cast<std::uint32_t>(fields.size() + 2));
  packer.pack("t").pack(kind).pack("id").pack(id);
  for (const auto& [name, value] : fields) {
    if (name == "t" || name == "id") {
      raise(refusal("unsupported_option", name + " is the client's own to choose", name));
    }
    packer.pack(name);
    write_msgpack(packer, value);
  }
  return {buffer.data(), buffer.size()};
}

/// Answers to one request so far; guarded by its session's mutex.
struct Exchange {
  std::string id;
  std::string ends_with;  // The type of the answer that ends it.
  std::shared_ptr<const Callback> callback;
  bool calling = false;
  std::deque<Event> events;
  std::size_t bytes = 0;  // Of events that nobody has taken.
  std::int64_t next_seq = 0;
  bool accepted = false;  // Of the session's thread, as is `next_seq`.
  bool sent = false;
  bool ended = false;
  std::optional<Value> reply;  // What ends a request that is no generation.
  std::optional<Failure> failure;
  std::condition_variable changed;
  std::optional<Wake> wake;
};

/// A session from its hello to its loss. Its thread alone touches the socket; what others ask of
/// it lies in `outbox_`. It keeps itself alive until the thread has ended.
class Session : public std::enable_shared_from_this<Session> {
 public:
  using Handle = std::shared_ptr<Exchange>;

  /// `patience` is how long a daemon that is not there is waited for; `numbers` makes ids that no
  /// session of a client has twice.
  Session(ClientOptions options, std::string address, std::atomic<std::uint64_t>& numbers,
          Clock::duration timeout, Clock::duration patience)
      : options_(std::move(options)),
        address_(std::move(address)),
        numbers_(numbers),
        timeout_(timeout),
        patience_(patience),
        clock_(seconds(options_.silence_s / renewals)) {}

  void start() {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  /// Wait for the welcome; throws what comes instead.
  void await_welcome() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return welcome_ || failure_; });
    if (failure_) raise(*failure_);
  }
  Welcome welcome() {
    const std::lock_guard lock(mutex_);
    return *welcome_;
  }
  /// True once no request can be sent any more.
  bool lost() {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  }
  /// True once its thread has nothing left to say; `close` then returns at once.
  bool over() {
    {
      const std::lock_guard lock(mutex_);
      if (!over_) return false;
    }
    close();
    return true;
  }
  /// Time of the loss of a session that was open before; the clock's beginning for others.
  Clock::time_point lost_at() {
    const std::lock_guard lock(mutex_);
    return lost_at_;
  }

  /// Send a request; none where the session was lost before, and another one may send it. Throws
  /// RequestRefused for one that is not to be sent.
  Handle request(const char* kind, const char* ends_with, const WireRequest& wire,
                 const std::shared_ptr<const Callback>& callback) {
    auto exchange = std::make_shared<Exchange>();
    exchange->id = std::to_string(++numbers_);
    exchange->ends_with = ends_with;
    exchange->callback = callback;
    std::string data = encode_request(kind, exchange->id, wire.fields);
    std::unique_lock lock(mutex_);
    if (failure_) return nullptr;
    check(data, wire.frames);
    if (outbox_.size() >= most_waiting) {
      raise(broken("connection_timeout", "too many messages wait to be sent"));
    }
    open_[exchange->id] = exchange;
    // A callback that asks runs on the thread that would send.
    exchange->sent = std::this_thread::get_id() == thread_id_;
    post({std::move(data), wire.frames, exchange});
    changed_.wait(lock, [&] { return exchange->sent || failure_; });
    return exchange->sent ? exchange : nullptr;
  }
  /// Ask the daemon to end a generation; does nothing when it has ended.
  void cancel(const Handle& exchange) {
    const std::lock_guard lock(mutex_);
    if (!exchange->ended) post_cancel(*exchange);
  }
  /// Read no more of a generation, which is cancelled; its callback has returned for the last time.
  void forget(const Handle& exchange) {
    std::unique_lock lock(mutex_);
    exchange->callback.reset();
    if (!exchange->ended) {
      exchange->ended = true;
      open_.erase(exchange->id);
      post_cancel(*exchange);
    }
    if (std::this_thread::get_id() != thread_id_) {
      exchange->changed.wait(lock, [&] { return !exchange->calling; });
    }
  }
  /// The next event, none after the last one, or when nothing came by `limit`.
  std::optional<Event> next(const Handle& exchange, std::optional<Clock::time_point> limit) {
    std::unique_lock lock(mutex_);
    wait(lock, *exchange, limit, [&] { return !exchange->events.empty() || exchange->ended; });
    if (exchange->events.empty()) return {};
    std::optional<Event> event(std::move(exchange->events.front()));
    exchange->events.pop_front();
    exchange->bytes -= size_of(*event);
    if (exchange->events.empty() && exchange->wake) exchange->wake->clear();
    return event;
  }
  /// The answer to a request that is no generation; throws its failure.
  Value reply(const Handle& exchange, Clock::duration most) {
    std::unique_lock lock(mutex_);
    wait(lock, *exchange, Clock::now() + most, [&] { return exchange->ended; });
    if (exchange->failure) raise(*exchange->failure);
    if (!exchange->reply) {
      open_.erase(exchange->id);
      raise(broken("connection_timeout", "the daemon has not answered the request in time"));
    }
    return std::move(*exchange->reply);
  }
  /// A descriptor that is readable while events wait, until the last one was taken.
  int descriptor(const Handle& exchange) {
    const std::lock_guard lock(mutex_);
    if (!exchange->wake) {
      exchange->wake.emplace();
      if (!exchange->events.empty()) exchange->wake->set();
    }
    return exchange->wake->descriptor();
  }
  /// End the session; what is open fails with client_closed, and the thread has ended behind it.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.set();
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // A callback closes its own client.
    } else {
      thread_.join();
    }
  }

 private:
  static constexpr int renewals = 3;  // In the time of a lease: two of them may be late.
  static constexpr double shortest_renewal_s = 0.01;  // Whatever lease is given.
  static constexpr std::size_t most_waiting = 1024;
  static constexpr int most_taken = 256;  // Messages between two looks at the clock.

  struct Outgoing {
    std::string data;
    std::vector<Frame> frames;
    Handle exchange;  // None of a message that is no request.
  };

  template <typename Ready>
  static void wait(std::unique_lock<std::mutex>& lock, Exchange& exchange,
                   std::optional<Clock::time_point> limit, Ready ready) {
    if (limit) {
      exchange.changed.wait_until(lock, *limit, ready);
    } else {
      exchange.changed.wait(lock, ready);  // Silence of the daemon ends every exchange.
    }
  }
  static std::size_t size_of(const Event& event) {
    const auto* delta = std::get_if<Delta>(&event);
    return delta ? delta->raw.size() : 0;
  }

  // --- asked by any thread, under the mutex ---

  void check(const std::string& data, const std::vector<Frame>& frames) const {
    const Limits& limits = welcome_->limits;
    const auto over = [](std::size_t size, std::int64_t most) {
      return size > static_cast<std::size_t>(std::max<std::int64_t>(most, 0));
    };
    // The daemon could not say whose message it was, and would end no request with its answer.
    if (over(data.size(), limits.frame_bytes)) {
      raise(refusal("message_too_large", "the message has " + std::to_string(data.size()) +
                                             " bytes, the limit is " +
                                             std::to_string(limits.frame_bytes)));
    }
    // A frame that the daemon does not expect may cost the connection, with all that is open.
    if (frames.empty()) return;
    if (limits.images == 0) {
      raise(refusal("unsupported_option", "the server's model takes no images", "messages"));
    }
    if (over(frames.size(), limits.images)) {
      raise(refusal("invalid_value",
                    "the request has " + std::to_string(frames.size()) +
                        " pictures, the limit is " + std::to_string(limits.images),
                    "messages"));
    }
    std::size_t largest = 0, sum = 0;
    for (const auto& frame : frames) {
      largest = std::max(largest, frame->size());
      sum += frame->size();
    }
    if (over(largest, limits.image_bytes)) {
      raise(refusal("image_too_large",
                    "a picture has " + std::to_string(largest) + " bytes, the limit is " +
                        std::to_string(limits.image_bytes),
                    "messages"));
    }
    if (over(sum, limits.request_image_bytes)) {
      raise(refusal("image_too_large",
                    "the pictures have " + std::to_string(sum) + " bytes together, the limit is " +
                        std::to_string(limits.request_image_bytes),
                    "messages"));
    }
  }
  void post(Outgoing message) {
    outbox_.push_back(std::move(message));
    wake_.set();
  }
  void post_cancel(const Exchange& exchange) {
    if (!failure_) post({encode(Value::Object{{"t", "cancel"}, {"id", exchange.id}}), {}, {}});
  }

  // --- the thread ---

  void run() {
    {
      const std::lock_guard lock(mutex_);
      thread_id_ = std::this_thread::get_id();
    }
    try {
      check_access(address_);
      Channel channel(address_, options_);
      say_hello(channel);
      while (!failed()) {
        wake_.clear();
        take_all(channel);
        if (failed() || !send_posted(channel)) break;
        const auto due = next_due();
        if (due) channel.wait(wake_, *due);
      }
    } catch (const Error& error) {
      lose(error.failure());
    } catch (const std::exception& error) {
      lose(broken("connection_failed", error.what()));
    }
    end_open();
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  bool failed() {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  }
  void say_hello(Channel& channel) {
    Value::Array features(options_.features.begin(), options_.features.end());
    Value::Object hello{{"t", "hello"}, {"proto", Value::Array{1}}};
    if (!options_.name.empty()) hello.emplace_back("client", options_.name);
    if (options_.lease_s) hello.emplace_back("lease_s", *options_.lease_s);
    if (options_.status_only) hello.emplace_back("status_only", true);
    if (!features.empty()) hello.emplace_back("features", std::move(features));
    channel.send(encode(hello));
  }
  /// Send what was posted and what renews the lease; false when the client was closed.
  bool send_posted(Channel& channel) {
    std::deque<Outgoing> outbox;
    bool closing = false, open = false;
    {
      const std::lock_guard lock(mutex_);
      outbox.swap(outbox_);
      closing = closing_;
      open = welcome_.has_value();
      for (const auto& one : outbox) {
        if (one.exchange && !closing) one.exchange->sent = true;
      }
    }
    changed_.notify_all();
    if (closing) {
      lose(broken("client_closed", "this client was closed: make another one"));
      if (open) channel.farewell(encode(Value::Object{{"t", "bye"}}));
      return false;
    }
    if (open && clock_.now() >= renew_at_) {
      outbox.push_back({encode(Value::Object{{"t", "lease"}}), {}, {}});
      renewed();
    }
    for (const auto& one : outbox) {
      if (channel.send(one.data, one.frames)) continue;
      lose(broken("connection_timeout", "the daemon does not take messages any more"));
      return false;
    }
    return true;
  }
  void take_all(Channel& channel) {
    // What came before a loss is taken before it.
    if (event_ == 0) event_ = channel.event();
    for (int taken = 0; taken < most_taken; ++taken) {
      auto raw = channel.receive();
      if (!raw) return take_event(channel);
      last_answer_ = clock_.now();
      arrived(channel, std::move(*raw));
    }
  }
  void take_event(Channel& channel) {
    const int event = std::exchange(event_, 0);
    if (event == 0) return;
    const bool open = is_open();
    if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
      lose(broken("not_allowed", "the daemon at " + address_ + " does not list this key"));
    } else if (event == ZMQ_EVENT_DISCONNECTED && open) {
      lose(broken("connection_lost", "the daemon closed the connection"));
    } else if (event == ZMQ_EVENT_DISCONNECTED) {
      say_hello(channel);  // Whoever listened is gone and cannot have kept the first hello.
    } else if (!open && clock_.now() >= patience_) {
      const std::string reason = absence(address_);
      if (reason.empty()) return;
      lose(broken("connection_refused", "no daemon listens at " + address_ + " (" + reason +
                                            "): start one with `hearth serve`"));
    }
  }
  bool is_open() {
    const std::lock_guard lock(mutex_);
    return welcome_.has_value();
  }
  void renewed() {
    const std::lock_guard lock(mutex_);
    const double lease_s = std::min(welcome_->limits.lease_s, options_.silence_s);
    renew_at_ = clock_.now() + seconds(std::max(lease_s / renewals, shortest_renewal_s));
  }
  /// Time until there is something to do; none where the daemon was silent for too long.
  std::optional<std::chrono::milliseconds> next_due() {
    const auto now = clock_.now();
    const bool open = is_open();
    const auto limit = open ? last_answer_ + seconds(options_.silence_s) : timeout_;
    if (now >= limit) {
      lose(broken("connection_timeout", "no answer from a daemon at " + address_));
      return {};
    }
    const auto due = open ? std::min(limit, renew_at_) : limit;
    // The clock is read often enough to count all of its time.
    const auto left = std::clamp(due - now, Clock::duration::zero(), clock_.most());
    return std::chrono::duration_cast<std::chrono::milliseconds>(left) +
           std::chrono::milliseconds(left == clock_.most() ? 0 : 1);
  }

  void arrived(Channel& channel, std::string raw) {
    const Value message = decode(raw);
    const Value* field = message.find("t");
    const auto* kind = field ? field->get_if<std::string>() : nullptr;
    if (!kind) unreadable("t");
    if (*kind == "welcome") {
      welcomed(answer<Welcome>(message), std::move(raw));
    } else if (*kind == "accepted") {
      if (const auto exchange = find(message)) accept(exchange, message, std::move(raw));
    } else if (*kind == "delta") {
      if (const auto exchange = find(message)) add(exchange, message, std::move(raw));
    } else if (*kind == "error") {
      failed_by(channel, message);
    } else if (*kind == "done" || *kind == "tokens" || *kind == "text" ||
               *kind == "status_report") {
      if (const auto exchange = find(message)) finish(exchange, *kind, message, std::move(raw));
    }  // `leased` says nothing more, and answers of other types are for later clients.
  }
  /// The open request that an answer is about; none for one that has ended.
  Handle find(const Value& message) {
    std::string id;
    FieldReader(message, "map").required("id", id);
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(id);
    return found == open_.end() ? nullptr : found->second;
  }
  void welcomed(Welcome welcome, std::string raw) {
    welcome.raw = std::move(raw);
    if (welcome.proto != 1) {
      raise(broken("unsupported_protocol", "the server chose no protocol of ours", "proto"));
    }
    const double lease_s = welcome.limits.lease_s;
    if (!std::isfinite(lease_s) || lease_s <= 0) {
      raise(broken("protocol_violation", "the server gives no lease", "lease_s"));
    }
    {
      const std::lock_guard lock(mutex_);
      if (welcome_ && welcome_->epoch != welcome.epoch) {
        raise(broken("connection_lost", "the daemon was restarted"));
      }
      welcome_ = std::move(welcome);
    }
    renewed();
    changed_.notify_all();
  }
  void failed_by(Channel& channel, const Value& message) {
    std::string id;
    FieldReader(message, "map").maybe("id", id);
    auto failure = answer<Failure>(message);
    // These two are about the session, whichever request they name.
    const bool of_all = failure.code == "connection_lost" || failure.code == "lease_expired";
    if (!id.empty() && !(of_all && find(message))) {
      if (const auto exchange = find(message)) end(exchange, std::move(failure));
      return;
    }
    const bool of_features = failure.code == "unsupported_option" && failure.field == "features";
    if (of_features && !options_.features.empty() && !is_open()) {
      options_.features.clear();  // A daemon of 0.1.0 refuses the field.
      say_hello(channel);
    } else if (is_open() || failure.code != "connection_lost") {
      raise(std::move(failure));
    }  // Else a message that ZeroMQ had queued came before the hello.
  }
  void accept(const Handle& exchange, const Value& message, std::string raw) {
    auto accepted = answer<Accepted>(message);
    accepted.raw = std::move(raw);
    if (exchange->ends_with != "done") return end(exchange, wrong_kind());
    if (!std::exchange(exchange->accepted, true)) push(exchange, std::move(accepted));
  }
  void add(const Handle& exchange, const Value& message, std::string raw) {
    auto delta = answer<Delta>(message);
    delta.raw = std::move(raw);
    if (exchange->ends_with != "done") return end(exchange, wrong_kind());
    if (delta.seq != exchange->next_seq) {
      return end(exchange, broken("protocol_violation",
                                  "delta " + std::to_string(delta.seq) + " came where " +
                                      std::to_string(exchange->next_seq) + " was due",
                                  "seq"));
    }
    ++exchange->next_seq;
    if (fits(*exchange, delta.raw.size())) return push(exchange, std::move(delta));
    end(exchange, Failure{Kind::service, "slow_client",
                          "the stream was not read while more came than it keeps", "", {}, {}});
  }
  /// True if the stream keeps so many bytes more; else it is cancelled.
  bool fits(const Exchange& exchange, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (exchange.bytes == 0 || exchange.bytes + bytes <= options_.buffer_bytes) return true;
    post_cancel(exchange);
    return false;
  }
  void finish(const Handle& exchange, const std::string& kind, const Value& message,
              std::string raw) {
    if (kind != exchange->ends_with) return end(exchange, wrong_kind());
    if (kind == "done") {
      auto done = answer<Done>(message);
      done.raw = std::move(raw);
      return end(exchange, std::move(done));
    }
    const std::lock_guard lock(mutex_);
    exchange->reply = message;
    exchange->ended = true;
    open_.erase(exchange->id);
    exchange->changed.notify_all();
  }
  static Failure wrong_kind() {
    return broken("protocol_violation", "the server answered with another kind of message");
  }
  /// Let the last event of a request follow.
  void end(const Handle& exchange, Event event) {
    {
      const std::lock_guard lock(mutex_);
      open_.erase(exchange->id);
      if (const auto* failure = std::get_if<Failure>(&event)) exchange->failure = *failure;
      if (exchange->ends_with != "done") exchange->ended = true;
    }
    push(exchange, std::move(event), true);
  }
  void push(const Handle& exchange, Event event, bool last = false) {
    std::unique_lock lock(mutex_);
    if (exchange->ended && exchange->ends_with == "done") return;  // Nobody reads it any more.
    if (const auto callback = exchange->callback) {
      exchange->calling = true;
      exchange->ended = last;
      lock.unlock();
      auto failure = fault_of(*callback, event);
      lock.lock();
      exchange->calling = false;
      if (failure && exchange->callback) {
        exchange->callback.reset();
        if (!exchange->ended) post_cancel(*exchange);
        open_.erase(exchange->id);
        exchange->ended = true;
        exchange->events.push_back(std::move(*failure));
        if (exchange->wake) exchange->wake->set();
      }
    } else {
      exchange->bytes += size_of(event);
      exchange->events.push_back(std::move(event));
      exchange->ended = last;
      if (exchange->wake) exchange->wake->set();
    }
    exchange->changed.notify_all();
  }
  /// Call a reader; what it throws.
  static std::optional<Failure> fault_of(const Callback& callback, const Event& event) {
    try {
      callback(event);
      return {};
    } catch (const std::exception& error) {
      return refusal("callback_failed", std::string("the callback threw: ") + error.what());
    } catch (...) {
      return refusal("callback_failed", "the callback threw");
    }
  }
  void lose(Failure failure) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = std::move(failure);
      if (welcome_) lost_at_ = Clock::now();
    }
    changed_.notify_all();
  }
  void end_open() {
    std::unordered_map<std::string, Handle> open;
    Failure failure;
    {
      const std::lock_guard lock(mutex_);
      open.swap(open_);
      failure = *failure_;
    }
    for (const auto& [id, exchange] : open) {
      if (exchange->sent) end(exchange, failure);
    }
  }

  ClientOptions options_;  // Its features are the thread's once that runs.
  const std::string address_;
  std::atomic<std::uint64_t>& numbers_;  // Of the client, who alone makes requests.
  const Clock::duration timeout_, patience_;
  std::thread thread_;
  Wake wake_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread::id thread_id_;
  std::optional<Welcome> welcome_;
  std::optional<Failure> failure_;
  Clock::time_point lost_at_{};
  bool closing_ = false;
  bool over_ = false;
  std::deque<Outgoing> outbox_;
  std::unordered_map<std::string, Handle> open_;

  RunningClock clock_;  // Of the thread alone, as all below.
  Clock::duration last_answer_{}, renew_at_{};
  int event_ = 0;  // Of the connection, not yet acted on.
};

}  // namespace detail
}  // namespace hearth

#endif
