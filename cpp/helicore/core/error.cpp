#include "helicore/core/error.h"

#include <array>
#include <charconv>
#include <cstdio>

namespace helicore {
namespace detail {
namespace {

template <typename Number>
void append_number(std::string& text, Number value) {
  std::array<char, 32> digits;  // the longest double takes 24
  const std::to_chars_result end =
      std::to_chars(digits.data(), digits.data() + digits.size(), value);
  text.append(digits.data(), end.ptr);
}

}  // namespace

void append(std::string& text, std::string_view part) { text.append(part); }
void append(std::string& text, std::int64_t value) { append_number(text, value); }
void append(std::string& text, std::uint64_t value) { append_number(text, value); }
void append(std::string& text, const void* pointer) {
  std::array<char, 16> digits;
  const auto value = reinterpret_cast<std::uintptr_t>(pointer);
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, 16);
  text.append("0x").append(digits.data(), end.ptr);
}
void append(std::string& text, float value) { append_number(text, value); }
void append(std::string& text, double value) { append_number(text, value); }

void throw_invalid(const char* where, const std::string& reason) {
  throw InvalidArgument(concat("[", where, "] ", reason));
}

void throw_internal(const char* where, const char* condition, const std::string& reason) {
  throw InternalError(
      concat("[", where, "] broken invariant: ", condition, reason.empty() ? "" : ": ", reason));
}

}  // namespace detail

void log_error(const std::string& message) noexcept {
  std::fprintf(stderr, "helicore: %s\n", message.c_str());
}

}  // namespace helicore
