// The error hierarchy and the check macros.
//
// HELICORE_CHECK is for the caller's fault and throws InvalidArgument with a message "[area.op]
// reason". "No room" in the scheduling loop is never an error: such calls return false, nullopt or
// a reason object. Bindings map: InvalidArgument -> ValueError, NotSupported ->
// helicore.NotSupportedError, OutOfMemory -> MemoryError, InternalError -> RuntimeError (see
// bindings/exceptions.cpp).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

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
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
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
