// The bench of clients/conformance/BENCH.md: one JSON object on standard output.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <hearth/hearth.hpp>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t side = 512;
constexpr int sessions = 32;

template <class Task>
double seconds(Task task) {
  const auto began = std::chrono::steady_clock::now();
  task();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

template <class Task>
double median(std::size_t count, Task task) {
  for (std::size_t i = 0; i < count / 10 + 1; ++i) task();
  std::vector<double> all(count);
  std::generate(all.begin(), all.end(), task);
  std::sort(all.begin(), all.end());
  return (all[(count - 1) / 2] + all[count / 2]) / 2;
}

std::unique_ptr<hearth::Client> open(const std::string& address) {
  hearth::ClientOptions options;
  options.address = address;
  auto client = std::make_unique<hearth::Client>(options);
  client->status();
  return client;
}

hearth::Bytes pixels() {
  std::random_device random;
  hearth::Bytes bytes(4 * side * side);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = i < 64 ? static_cast<std::uint8_t>(random()) : bytes[i - 64];
  }
  return bytes;
}

long resident_kb() {
  std::ifstream status("/proc/self/status");
  long kb = 0;
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> kb;
  }
  return kb;
}

}  // namespace

int main(int, char** arguments) try {
  const auto client = open(arguments[1]);
  const long before = resident_kb();
  std::vector<std::unique_ptr<hearth::Client>> more;
  for (int i = 0; i < sessions; ++i) more.push_back(open(arguments[1]));
  const double session = static_cast<double>(resident_kb() - before) / sessions;
  more.clear();
  const double status = median(200, [&] { return seconds([&] { client->status(); }); });
  const double delta = median(20, [&] {
    int deltas = 0;
    const double time = seconds([&] {
      hearth::GenerateRequest request;
      request.prompt = "Once upon a time";
      request.max_tokens = 256;
      request.ignore_eos = true;
      auto reply = client->generate(request);
      for ([[maybe_unused]] const auto& one : reply) ++deltas;
    });
    return time / deltas;
  });
  const double image = median(10, [&] {
    auto bytes = pixels();
    return seconds([&] {
      hearth::GenerateRequest request;
      request.messages = {
          hearth::Message::user({hearth::Image::pixels(std::move(bytes), "rgba8", side, side)})};
      request.max_tokens = 1;
      client->generate(request).result();
    });
  });
  std::cout << "{\"status_us\": " << 1e6 * status << ", \"delta_us\": " << 1e6 * delta
            << ", \"image_ms\": " << 1e3 * image << ", \"rss_kb\": " << session << "}\n";
} catch (const hearth::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
