// The socket of a client: one DEALER, its connection's events, and the clock of its silence.
#ifndef HEARTH_CHANNEL_HPP
#define HEARTH_CHANNEL_HPP

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "address.hpp"
#include "answer.hpp"
#include "request.hpp"

namespace hearth {

/// A client's settings; times are in seconds.
struct ClientOptions {
  /// A path, ipc://PATH or tcp://HOST:PORT; empty: $HEARTH_SOCKET, else the agreed place.
  std::string address;
  /// A name for the daemon's logs.
  std::string name;
  /// Wait for the welcome. Where it is set, a daemon that is about to start is waited for as long;
  /// else it is 5, and a daemon that is not there is an error at once.
  std::optional<double> timeout_s;
  /// Time without any answer after which the daemon is given up.
  double silence_s = 60;
  /// Time for the answer to `status`, `tokenize` and `detokenize`.
  double answer_s = 60;
  /// The lease to ask for; the daemon's own where it is not set.
  std::optional<double> lease_s;
  /// The session asks for `status` alone, and has a place where all others are taken.
  bool status_only = false;
  /// What the client reads beyond the first version, see PROTOCOL.md.
  std::vector<std::string> features{"reasoning", "tool_calls", "end_details", "token_bytes"};
  /// Bytes of answers that one stream keeps for a slow reader, before it ends with slow_client.
  std::size_t buffer_bytes = std::size_t{8} << 20;
  /// CURVE keys for tcp://, 40 characters each.
  std::string server_key, public_key, secret_key;
};

namespace detail {

using Clock = std::chrono::steady_clock;

/// A time of a program or a daemon, from none to a century, beyond which the clock could not count.
inline Clock::duration seconds(double count) {
  constexpr double century = 3.2e9;
  count = count < century ? std::max(count, 0.0) : century;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

/// Descriptor that is readable while it is raised.
class Wake {
 public:
  Wake() : descriptor_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (descriptor_ < 0) raise(broken("connection_failed", "no file descriptor is free"));
  }
  Wake(const Wake&) = delete;
  Wake& operator=(const Wake&) = delete;
  ~Wake() { ::close(descriptor_); }

  int descriptor() const noexcept { return descriptor_; }
  void set() noexcept { (void)!::eventfd_write(descriptor_, 1); }
  void clear() noexcept {
    eventfd_t count;
    (void)!::eventfd_read(descriptor_, &count);
  }

 private:
  int descriptor_;
};

/// The ZeroMQ side: one DEALER, and the events of its connection. It belongs to one thread.
class Channel {
 public:
  Channel(const std::string& address, const ClientOptions& options)
      : dealer_(context_, zmq::socket_type::dealer), monitor_(context_, zmq::socket_type::pair) {
    dealer_.set(zmq::sockopt::linger, 0);
    dealer_.set(zmq::sockopt::maxmsgsize, std::int64_t{16} << 20);
    dealer_.set(zmq::sockopt::reconnect_ivl, 20);
    dealer_.set(zmq::sockopt::reconnect_ivl_max, 200);
    if (begins(address, "tcp://")) {
      dealer_.set(zmq::sockopt::curve_serverkey, options.server_key);
      dealer_.set(zmq::sockopt::curve_publickey, options.public_key);
      dealer_.set(zmq::sockopt::curve_secretkey, options.secret_key);
    }
    const char* place = "inproc://events";
    if (zmq_socket_monitor(dealer_.handle(), place,
                           ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                               ZMQ_EVENT_CLOSED) != 0) {
      throw zmq::error_t();
    }
    monitor_.set(zmq::sockopt::linger, 0);
    monitor_.connect(place);
    dealer_.connect(address);
  }

  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel() {
    // Its events would wait for ever for a monitor that was closed before.
    zmq_socket_monitor(dealer_.handle(), nullptr, 0);
  }

  /// Queue one message; false when the daemon has stopped reading.
  bool send(const std::string& data, const std::vector<Frame>& frames = {}) {
    const auto flags = [&](std::size_t sent) {
      const auto more = sent < frames.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
      return more | zmq::send_flags::dontwait;
    };
    if (!dealer_.send(zmq::buffer(data), flags(0))) return false;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      // The picture is not copied: it lives until ZeroMQ has sent it.
      auto* kept = new Frame(frames[i]);
      zmq::message_t message(
          const_cast<std::uint8_t*>((*kept)->data()), (*kept)->size(),
          [](void*, void* hint) { delete static_cast<Frame*>(hint); }, kept);
      if (!dealer_.send(std::move(message), flags(i + 1))) return false;
    }
    return true;
  }
  /// The first frame of the next message, if there is one now.
  std::optional<std::string> receive() {
    zmq::message_t message, behind;
    if (!dealer_.recv(message, zmq::recv_flags::dontwait)) return {};
    std::string data = message.to_string();
    for (bool more = message.more(); more; more = behind.more()) {
      if (!dealer_.recv(behind, zmq::recv_flags::dontwait)) break;
    }
    return data;
  }
  /// The next event of the connection (ZMQ_EVENT_...), 0 for none; drain `receive` before.
  int event() {
    zmq::message_t head, address;
    if (!monitor_.recv(head, zmq::recv_flags::dontwait)) return 0;
    if (head.more()) (void)!monitor_.recv(address, zmq::recv_flags::dontwait);
    std::uint16_t event = 0;
    if (head.size() >= sizeof event) std::memcpy(&event, head.data(), sizeof event);
    return event;
  }
  /// Block until something comes or `wake` is raised.
  void wait(const Wake& wake, std::chrono::milliseconds most) {
    std::array<zmq::pollitem_t, 3> items{{{dealer_.handle(), 0, ZMQ_POLLIN, 0},
                                          {monitor_.handle(), 0, ZMQ_POLLIN, 0},
                                          {nullptr, wake.descriptor(), ZMQ_POLLIN, 0}}};
    try {
      zmq::poll(items.data(), items.size(), most);
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
  }
  /// Say a last message, which gets a moment to leave.
  void farewell(const std::string& data) {
    dealer_.set(zmq::sockopt::linger, 100);
    send(data);
  }

 private:
  zmq::context_t context_;
  zmq::socket_t dealer_;
  zmq::socket_t monitor_;
};

/// Time that this process ran: a machine that was paused takes at most `most` of its pause for the
/// silence of others, which may have been paused with it.
class RunningClock {
 public:
  explicit RunningClock(Clock::duration most) : most_(most) {}
  Clock::duration most() const { return most_; }
  Clock::duration now() {
    const auto seen = Clock::now();
    ran_ += std::min(seen - seen_, most_);
    seen_ = seen;
    return ran_;
  }

 private:
  Clock::duration most_;
  Clock::time_point seen_ = Clock::now();
  Clock::duration ran_{};
};

}  // namespace detail
}  // namespace hearth

#endif
