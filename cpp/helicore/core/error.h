// The error hierarchy and the check macros.
//
// HELICORE_CHECK is for the caller's fault and throws InvalidArgument with a message "[area.op]
// reason". "No room" in the scheduling loop is never an error: such calls return false, nullopt or
// a reason object. Bindings map: InvalidArgument -> ValueError, NotSupported ->
// helicore.NotSupportedError, OutOfMemory -> MemoryError, InternalError -> RuntimeError (see
// bindings/exceptions.cpp).
#pragma once

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace helicore {

// The caller passed something wrong; the message names the argument, its value and what is allowed.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A valid request that this build or machine can't serve; the message lists what is supported.
class NotSupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory of a tier could not be had from the system.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A broken invariant: a bug in helicore.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// A CUDA call failed; `code` is the cudaError_t.
class CudaError : public std::runtime_error {
 public:
  CudaError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

namespace detail {
// The text of one part of a message. No stream: a message must be formed whatever the state of the
// process's locales is, and a check should not pull <ostream> into every file.
void append(std::string& text, std::string_view part);
void append(std::string& text, std::int64_t value);
void append(std::string& text, std::uint64_t value);
void append(std::string& text, const void* pointer);  // hexadecimal
void append(std::string& text, float value);   // the shortest digits that read back as `value`
void append(std::string& text, double value);  // likewise

template <typename Part>
void append_part(std::string& text, const Part& part) {
  if constexpr (std::same_as<Part, bool>) {
    append(text, part ? std::string_view("true") : std::string_view("false"));
  } else if constexpr (std::same_as<Part, char>) {
    text.push_back(part);
  } else if constexpr (std::floating_point<Part>) {
    append(text, part);
  } else if constexpr (std::signed_integral<Part>) {
    append(text, static_cast<std::int64_t>(part));
  } else if constexpr (std::unsigned_integral<Part>) {
    append(text, static_cast<std::uint64_t>(part));
  } else if constexpr (std::convertible_to<const Part&, std::string_view>) {
    append(text, std::string_view(part));
  } else if constexpr (std::convertible_to<const Part&, const void*>) {
    append(text, static_cast<const void*>(part));
  } else {
    append_part(text, part.value());  // StrongIndex
  }
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_part(text, parts), ...);
  return text;
}
[[noreturn]] void throw_invalid(const char* where, const std::string& reason);
[[noreturn]] void throw_internal(const char* where, const char* condition,
                                 const std::string& reason);
}  // namespace detail

// Writes one line to stderr; for destructors, which never throw.
void log_error(const std::string& message) noexcept;

}  // namespace helicore

// HELICORE_CHECK(x > 0, "kv.resize", "capacity must be > 0, got ", x)
#define HELICORE_CHECK(condition, where, ...)                                            \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      ::helicore::detail::throw_invalid(where, ::helicore::detail::concat(__VA_ARGS__)); \
    }                                                                                    \
  } while (false)

// A broken invariant; always on, keep it off hot inner loops.
#define HELICORE_ASSERT(condition, where, ...)                                     \
  do {                                                                             \
    if (!(condition)) [[unlikely]] {                                               \
      ::helicore::detail::throw_internal(where, #condition,                        \
                                         ::helicore::detail::concat(__VA_ARGS__)); \
    }                                                                              \
  } while (false)
