#include "helicore/nn/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/cpu/sampling_kernels.h"
#include "helicore/nn/sampling_row.h"

namespace helicore::nn {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void check_logits(const TensorView& logits, const char* where) {
  check_shape(logits, {-1, -1}, where, "logits");
  check_cpu(logits, where, "logits");
  check_dtype(logits, DType::kFloat32, where, "logits");
  check_row_major(logits, where, "logits");
  HELICORE_CHECK(logits.size(1) >= 1 && logits.size(1) <= std::numeric_limits<int32_t>::max(),
                 where, "logits must have at least one column, got ", logits.describe());
}

void check_column(const TensorView& t, int64_t rows, DType dtype, const char* where,
                  const char* name) {
  check_shape(t, {rows}, where, name);
  check_plain(t, dtype, where, name);
}

const float* row_of(const TensorView& logits, int64_t row) {
  return logits.ptr<float>() + row * logits.stride(0);
}

void check_settings(const SampleTensors& t) {
  constexpr const char* kWhere = "nn.sample";
  check_logits(t.logits, kWhere);
  const int64_t rows = t.logits.size(0);
  check_column(t.temperature, rows, DType::kFloat32, kWhere, "temperature");
  check_column(t.top_k, rows, DType::kInt32, kWhere, "top_k");
  check_column(t.top_p, rows, DType::kFloat32, kWhere, "top_p");
  check_column(t.min_p, rows, DType::kFloat32, kWhere, "min_p");
  check_column(t.seed, rows, DType::kInt64, kWhere, "seed");
  check_column(t.position, rows, DType::kInt64, kWhere, "position");
  check_column(t.ids, rows, DType::kInt32, kWhere, "ids");
  if (t.logprobs != nullptr) {
    check_column(*t.logprobs, rows, DType::kFloat32, kWhere, "logprobs");
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float temperature = t.temperature.ptr<float>()[r];
    const float top_p = t.top_p.ptr<float>()[r];
    const float min_p = t.min_p.ptr<float>()[r];
    HELICORE_CHECK(temperature >= 0.0f && std::isfinite(temperature), kWhere, "temperature[", r,
                   "] must be finite and >= 0, got ", temperature);
    HELICORE_CHECK(top_p > 0.0f && top_p <= 1.0f, kWhere, "top_p[", r, "] must be in (0, 1], got ",
                   top_p);
    HELICORE_CHECK(min_p >= 0.0f && min_p <= 1.0f, kWhere, "min_p[", r, "] must be in [0, 1], got ",
                   min_p);
  }
}

// log(sum of e^row); `best` is that of the row and holds an id.
float log_sum_exp(const float* row, int64_t size, const RowMax& best) {
  const double sum = HELICORE_DISPATCH_ISA(exp_sum_kernel(row, size, best.value));
  return static_cast<float>(static_cast<double>(best.value) + std::log(sum));
}

// Rows per task so that a task is worth handing out.
template <typename Fn>
void for_rows(int64_t rows, double row_ns, Fn&& fn) {
  const auto chunk = static_cast<int64_t>(2e3 / row_ns) + 1;
  default_pool().parallel_for_worker((rows + chunk - 1) / chunk, [&](int64_t task, int worker) {
    for (int64_t r = task * chunk; r < std::min(rows, (task + 1) * chunk); ++r) fn(r, worker);
  });
}

void sample_row(const SampleTensors& t, int64_t r, int worker) {
  const float* row = row_of(t.logits, r);
  const int64_t size = t.logits.size(1);
  const RowMax best = HELICORE_DISPATCH_ISA(row_max_kernel(row, size));
  int32_t id = best.id;
  const float temperature = t.temperature.ptr<float>()[r];
  if (id >= 0 && temperature > 0.0f) {
    RowSettings settings;
    settings.temperature = temperature;
    settings.top_k = t.top_k.ptr<int32_t>()[r];
    settings.top_p = t.top_p.ptr<float>()[r];
    settings.min_p = t.min_p.ptr<float>()[r];
    settings.seed = static_cast<uint64_t>(t.seed.ptr<int64_t>()[r]);
    settings.position = static_cast<uint64_t>(t.position.ptr<int64_t>()[r]);
    void* scratch = default_pool().scratch(worker, draw_scratch_bytes(size));
    id = draw_token(row, size, best.value, settings, scratch);
  }
  t.ids.ptr<int32_t>()[r] = id;
  if (t.logprobs != nullptr) {
    t.logprobs->ptr<float>()[r] = id < 0 ? kNan : row[id] - log_sum_exp(row, size, best);
  }
}

// The n best tokens of a row: a bounded insertion for small n, a partial sort above.
void best_tokens(const float* row, int64_t size, int64_t n, int32_t* ids) {
  auto before = [row](int32_t a, int32_t b) {
    return row[a] > row[b] || (row[a] == row[b] && a < b);
  };
  if (n > 64) {
    for (int64_t i = 0; i < size; ++i) ids[i] = static_cast<int32_t>(i);
    std::partial_sort(ids, ids + n, ids + size, before);
    return;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < size && n > 0; ++i) {
    if (count == n && !(row[i] > row[ids[n - 1]])) continue;
    int64_t at = count < n ? count++ : n - 1;
    for (; at > 0 && row[i] > row[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(i);
  }
}

void logprobs_row(const LogprobTensors& t, int64_t r, int worker) {
  const float* row = row_of(t.logits, r);
  const int64_t size = t.logits.size(1);
  const int64_t n = t.top_ids.size(1);
  int32_t* top_ids = t.top_ids.ptr<int32_t>() + r * n;
  float* top = t.top_logprobs.ptr<float>() + r * n;
  const RowMax best = HELICORE_DISPATCH_ISA(row_max_kernel(row, size));
  if (best.id < 0) {
    t.logprobs.ptr<float>()[r] = kNan;
    t.ranks.ptr<int32_t>()[r] = 0;
    for (int64_t i = 0; i < n; ++i) {
      top_ids[i] = static_cast<int32_t>(i);
      top[i] = kNan;
    }
    return;
  }
  const float log_sum = log_sum_exp(row, size, best);
  const int32_t id = t.ids.ptr<int32_t>()[r];
  t.logprobs.ptr<float>()[r] = id < 0 ? kNan : row[id] - log_sum;
  t.ranks.ptr<int32_t>()[r] = id < 0 ? 0
                                     : 1 + static_cast<int32_t>(HELICORE_DISPATCH_ISA(
                                               count_greater_kernel(row, size, row[id])));
  if (n == 0) return;
  int32_t* order = top_ids;
  if (n > 64) {
    order = static_cast<int32_t*>(
        default_pool().scratch(worker, static_cast<size_t>(size) * sizeof(int32_t)));
  }
  best_tokens(row, size, n, order);
  for (int64_t i = 0; i < n; ++i) {
    top_ids[i] = order[i];
    top[i] = row[order[i]] - log_sum;
  }
}

}  // namespace

void sample(const SampleTensors& t) {
  check_settings(t);
  bool draws = false;
  for (int64_t r = 0; r < t.logits.size(0); ++r) draws |= t.temperature.ptr<float>()[r] > 0.0f;
  const double row_ns = static_cast<double>(t.logits.size(1)) * (draws ? 2.0 : 0.3) + 50.0;
  for_rows(t.logits.size(0), row_ns, [&](int64_t r, int worker) { sample_row(t, r, worker); });
}

void top_logprobs(const LogprobTensors& t) {
  constexpr const char* kWhere = "nn.top_logprobs";
  check_logits(t.logits, kWhere);
  const int64_t rows = t.logits.size(0);
  const int64_t size = t.logits.size(1);
  check_column(t.ids, rows, DType::kInt32, kWhere, "ids");
  check_column(t.logprobs, rows, DType::kFloat32, kWhere, "logprobs");
  check_column(t.ranks, rows, DType::kInt32, kWhere, "ranks");
  check_shape(t.top_ids, {rows, -1}, kWhere, "top_ids");
  check_plain(t.top_ids, DType::kInt32, kWhere, "top_ids");
  const int64_t n = t.top_ids.size(1);
  HELICORE_CHECK(n <= size, kWhere, "n must be in 0..", size, " (the vocabulary), got ", n);
  check_shape(t.top_logprobs, {rows, n}, kWhere, "top_logprobs");
  check_plain(t.top_logprobs, DType::kFloat32, kWhere, "top_logprobs");
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t id = t.ids.ptr<int32_t>()[r];
    HELICORE_CHECK(id >= -1 && id < size, kWhere, "ids[", r, "] must be in -1..", size - 1,
                   ", got ", id);
  }
  for_rows(rows, static_cast<double>(size) * 0.8 + 50.0,
           [&](int64_t r, int worker) { logprobs_row(t, r, worker); });
}

}  // namespace helicore::nn
