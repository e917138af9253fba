// Address of the daemon's socket.
#ifndef HEARTH_ADDRESS_HPP
#define HEARTH_ADDRESS_HPP

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "error.hpp"

namespace hearth::detail {

inline constexpr const char* system_path = "/run/hearth/hearth.sock";
inline constexpr const char* ipc = "ipc://";

inline bool begins(const std::string& text, const char* with) {
  return text.compare(0, std::strlen(with), with) == 0;
}

inline std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// The first agreed place with a socket: the user's, the system's; the user's own where there is
/// none yet.
inline std::string agreed_path() {
  const std::string folder = variable("XDG_RUNTIME_DIR");
  if (folder.empty()) return system_path;
  const std::string own = folder + "/hearth/hearth.sock";
  return ::access(own.c_str(), F_OK) == 0 || ::access(system_path, F_OK) != 0 ? own : system_path;
}

/// The address of a path, of ipc://PATH or tcp://HOST:PORT; of `$HEARTH_SOCKET`, else the agreed
/// place, where `named` is empty. Throws ConnectionFailed.
inline std::string resolve_address(std::string named) {
  if (named.empty()) named = variable("HEARTH_SOCKET");
  if (named.empty()) named = agreed_path();
  if (begins(named, "tcp://")) return named;
  const std::string path = begins(named, ipc) ? named.substr(std::strlen(ipc)) : named;
  if (path.find("://") != std::string::npos) {
    raise(broken("connection_failed",
                 named + " is not the path of a socket: give a path, ipc://PATH or tcp://HOST:PORT"));
  }
  constexpr std::size_t most = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > most) {
    raise(broken("connection_failed", "the socket path " + path + " has " +
                                          std::to_string(path.size()) + " bytes, at most " +
                                          std::to_string(most) + " are possible"));
  }
  return ipc + path;
}

/// Throw ConnectionFailed for a socket that this user may not open: ZeroMQ would try for ever.
inline void check_access(const std::string& address) {
  if (!begins(address, ipc)) return;
  const std::string path = address.substr(std::strlen(ipc));
  if (::access(path.c_str(), W_OK) != 0 && errno == EACCES) {
    raise(broken("not_allowed", "not allowed to use " + path + ": join the group that owns it"));
  }
}

/// Reason why no daemon listens at a local address; "" where one may, a busy one for example.
inline std::string absence(const std::string& address) {
  if (!begins(address, ipc)) return "";
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  address.copy(name.sun_path, sizeof name.sun_path - 1, std::strlen(ipc));
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (probe < 0) return "";
  const int found = ::connect(probe, reinterpret_cast<const sockaddr*>(&name), sizeof name);
  const int why = found == 0 ? 0 : errno;
  ::close(probe);
  if (why == ENOENT) return "there is no such socket";
  return why == ECONNREFUSED ? "nobody listens" : "";
}

}  // namespace hearth::detail

#endif
