// Releasing the GIL only where a call is long enough to be worth it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

namespace helicore::bindings {

// A kernel over a few rows takes microseconds: giving the GIL up for it would let another Python
// thread keep it for a whole switch interval. Kernels never call back into Python, so holding it
// cannot deadlock. The estimate is rough and for one thread.
class ReleaseGilIfLong {
 public:
  static constexpr double kWorthReleasingNs = 5e4;

  explicit ReleaseGilIfLong(double estimated_ns) {
    if (estimated_ns >= kWorthReleasingNs) release_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> release_;
};

// The same, for calls whose length goes with the number of rows alone.
class ReleaseGilForRows {
 public:
  static constexpr int64_t kRowsWorthReleasing = 32;

  explicit ReleaseGilForRows(int64_t rows) {
    if (rows >= kRowsWorthReleasing) release_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> release_;
};

// Destroys a bound object without the GIL: for types whose destructor takes a lock or waits for
// work. Python lets go of an object in any thread, so the holder of that lock may be waiting for
// the GIL. Use it in a specialisation of nanobind::detail::wrap_destruct before the class is bound.
template <typename T>
void destroy_without_gil(void* value) noexcept {
  const nanobind::gil_scoped_release release;
  static_cast<T*>(value)->~T();
}

}  // namespace helicore::bindings
