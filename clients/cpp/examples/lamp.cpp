#include <hearth/hearth.hpp>
#include <iostream>

int main() try {
  hearth::Client client;  // $HEARTH_SOCKET, or the agreed place
  auto request = hearth::GenerateRequest::ask("Turn on the desk lamp");
  request.max_tokens = 64;
  auto reply = client.generate(request);
  for (const auto& delta : reply) std::cout << delta.text << std::flush;
  std::cout << '\n';
} catch (const hearth::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
