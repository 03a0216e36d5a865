// Errors of the KV cache manager beyond those of core/error.h. Scheduling calls report "no room" as
// a value; these are for misuse and for the attribute-style setters.
#pragma once

#include <stdexcept>

#include "helicore/kv/types.h"

namespace helicore::kv {

// A setter could not get its pages. Python: OutOfPagesError with the reason's fields.
class OutOfPages : public std::runtime_error {
 public:
  explicit OutOfPages(const NoRoom& reason)
      : std::runtime_error(describe(reason)), reason_(reason) {}
  [[nodiscard]] const NoRoom& reason() const noexcept { return reason_; }

 private:
  NoRoom reason_;
};

// A call in a state that does not allow it (a closed cache, commit after stop). Python: LogicError.
class LogicError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Pages of a cache are gone because a copy of them failed. Python: DataLostError.
class DataLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The manager still has open caches. Python: ResourceBusyError.
class ResourceBusy : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace helicore::kv

// HELICORE_KV_STATE(is_active(), "kv.resize", "cache 3 is SUSPENDED, must be ACTIVE")
#define HELICORE_KV_STATE(condition, where, ...)                                                   \
  do {                                                                                             \
    if (!(condition)) [[unlikely]] {                                                               \
      throw ::helicore::kv::LogicError(::helicore::detail::concat("[", where, "] ", __VA_ARGS__)); \
    }                                                                                              \
  } while (false)
