#include "helicore/core/error.h"

#include <cstdio>

namespace helicore {
namespace detail {

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
