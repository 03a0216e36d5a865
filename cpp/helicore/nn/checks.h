// Argument checks shared by the public entries of nn and moe.
#pragma once

#include <cstdint>

#include "helicore/core/error.h"
#include "helicore/core/tensor_view.h"
#include "helicore/core/thread_pool.h"

namespace helicore::nn {

inline void check_cpu(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCpu, where, name, " must be on the CPU, got ",
                 t.describe());
}

// bfloat16 or float32, on the CPU, last dimension contiguous.
inline void check_float_rows(const TensorView& t, const char* where, const char* name) {
  check_cpu(t, where, name);
  HELICORE_CHECK(t.dtype == DType::kBFloat16 || t.dtype == DType::kFloat32, where, name,
                 " must be bfloat16 or float32, got ", t.describe());
  check_row_major(t, where, name);
}

// `dtype`, on the CPU, contiguous.
inline void check_plain(const TensorView& t, DType dtype, const char* where, const char* name) {
  check_cpu(t, where, name);
  check_dtype(t, dtype, where, name);
  check_contiguous(t, where, name);
}

// Runs fn(begin, end) over [0, rows) in chunks, in parallel when rows * cost_ns is worth a region.
template <typename Fn>
void for_row_chunks(int64_t rows, double cost_ns, Fn&& fn) {
  ThreadPool& pool = default_pool();
  if (rows == 0) return;
  if (pool.num_threads() == 1 || rows == 1 || static_cast<double>(rows) * cost_ns < 4e3) {
    return fn(int64_t{0}, rows);
  }
  const auto at_least = static_cast<int64_t>(2e3 / cost_ns) + 1;
  const int64_t share = (rows + 2 * pool.num_threads() - 1) / (2 * pool.num_threads());
  const int64_t chunk = share > 256 ? 256 : (share < at_least ? at_least : share);
  pool.parallel_for((rows + chunk - 1) / chunk, [&](int64_t task) {
    const int64_t begin = task * chunk;
    fn(begin, begin + chunk < rows ? begin + chunk : rows);
  });
}

}  // namespace helicore::nn
