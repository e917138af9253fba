// Checks that count their failures, for programs of tests.
#ifndef HEARTH_TESTS_CHECKS_HPP
#define HEARTH_TESTS_CHECKS_HPP

#include <hearth/hearth.hpp>

#include <iostream>
#include <string>

namespace checks {

inline int& failures() {
  static int count = 0;
  return count;
}
inline void check(bool holds, const std::string& what, int line) {
  if (holds) return;
  ++failures();
  std::cerr << "line " << line << ": " << what << '\n';
}
/// Code of what `action` throws; "" where it throws nothing.
template <typename Action>
std::string code_of(Action action) {
  try {
    action();
  } catch (const hearth::Error& error) {
    return error.code();
  }
  return "";
}

}  // namespace checks

#define CHECK(condition) checks::check(static_cast<bool>(condition), #condition, __LINE__)
#define CHECK_IN(condition, where) \
  checks::check(static_cast<bool>(condition), std::string(#condition " in ") + (where), __LINE__)

#endif
