// In-place changes of logits before sampling (declared in sampling.h).
#include <cmath>
#include <cstring>
#include <limits>

#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/sampling.h"

namespace helicore::nn {
namespace {

void check_logits(const TensorView& logits, const char* where) {
  check_shape(logits, {-1, -1}, where, "logits");
  check_cpu(logits, where, "logits");
  check_dtype(logits, DType::kFloat32, where, "logits");
  check_row_major(logits, where, "logits");
}

void check_lists(const TokenLists& lists, const TensorView& logits, const char* where,
                 const char* name) {
  check_shape(lists.row_ptr, {logits.size(0) + 1}, where, "row_ptr");
  check_plain(lists.row_ptr, DType::kInt32, where, "row_ptr");
  check_shape(lists.ids, {-1}, where, name);
  check_plain(lists.ids, DType::kInt32, where, name);
  const int32_t* row_ptr = lists.row_ptr.ptr<int32_t>();
  HELICORE_CHECK(row_ptr[0] == 0, where, "row_ptr of ", name, " must begin with 0, got ",
                 row_ptr[0]);
  for (int64_t r = 0; r < logits.size(0); ++r) {
    HELICORE_CHECK(row_ptr[r + 1] >= row_ptr[r], where, "row_ptr of ", name, " must ascend, got ",
                   row_ptr[r], " then ", row_ptr[r + 1]);
  }
  HELICORE_CHECK(row_ptr[logits.size(0)] == lists.ids.size(0), where, "row_ptr of ", name,
                 " must end with their number ", lists.ids.size(0), ", got ",
                 row_ptr[logits.size(0)]);
  for (int64_t i = 0; i < lists.ids.size(0); ++i) {
    const int32_t id = lists.ids.ptr<int32_t>()[i];
    HELICORE_CHECK(id >= 0 && id < logits.size(1), where, name, "[", i, "] must be in 0..",
                   logits.size(1) - 1, ", got ", id);
  }
}

float* row_of(const TensorView& logits, int64_t row) {
  return logits.ptr<float>() + row * logits.stride(0);
}

// Calls fn(id, index) for the ids of one row.
template <typename Fn>
void for_ids(const TokenLists& lists, int64_t row, Fn&& fn) {
  const int32_t* row_ptr = lists.row_ptr.ptr<int32_t>();
  for (int32_t i = row_ptr[row]; i < row_ptr[row + 1]; ++i) fn(lists.ids.ptr<int32_t>()[i], i);
}

// counts [V] is all zero on entry and on return: the number of times an id occurs in the output, or
// -1 for an id of the prompt only that is still to be treated.
void penalise_row(const PenaltyTensors& t, int64_t row, int32_t* counts) {
  const float repetition = t.repetition.ptr<float>()[row];
  const float presence = t.presence.ptr<float>()[row];
  const float frequency = t.frequency.ptr<float>()[row];
  float* logits = row_of(t.logits, row);
  auto repeat = [&](int32_t id) {
    logits[id] = logits[id] > 0.0f ? logits[id] / repetition : logits[id] * repetition;
  };
  for_ids(t.output, row, [&](int32_t id, int32_t) { ++counts[id]; });
  if (repetition != 1.0f) {
    for_ids(t.prompt, row, [&](int32_t id, int32_t) {
      if (counts[id] != 0) return;
      repeat(id);
      counts[id] = -1;
    });
    for_ids(t.prompt, row, [&](int32_t id, int32_t) {
      if (counts[id] < 0) counts[id] = 0;
    });
  }
  for_ids(t.output, row, [&](int32_t id, int32_t) {
    if (counts[id] == 0) return;
    if (repetition != 1.0f) repeat(id);
    logits[id] -= frequency * static_cast<float>(counts[id]);
    logits[id] -= presence;
    counts[id] = 0;
  });
}

}  // namespace

void apply_penalties(const PenaltyTensors& t) {
  constexpr const char* kWhere = "nn.apply_penalties";
  check_logits(t.logits, kWhere);
  check_lists(t.prompt, t.logits, kWhere, "prompt ids");
  check_lists(t.output, t.logits, kWhere, "output ids");
  const int64_t rows = t.logits.size(0);
  const TensorView* settings[] = {&t.repetition, &t.presence, &t.frequency};
  const char* names[] = {"repetition", "presence", "frequency"};
  for (int i = 0; i < 3; ++i) {
    check_shape(*settings[i], {rows}, kWhere, names[i]);
    check_plain(*settings[i], DType::kFloat32, kWhere, names[i]);
    for (int64_t r = 0; r < rows; ++r) {
      const float value = settings[i]->ptr<float>()[r];
      HELICORE_CHECK(std::isfinite(value) && (i > 0 || value > 0.0f), kWhere, names[i], "[", r,
                     "] must be finite", i == 0 ? " and > 0" : "", ", got ", value);
    }
  }
  ThreadPool& pool = default_pool();
  const auto bytes = static_cast<size_t>(t.logits.size(1)) * sizeof(int32_t);
  pool.parallel_for_worker(rows, [&](int64_t row, int worker) {
    if (t.repetition.ptr<float>()[row] == 1.0f && t.presence.ptr<float>()[row] == 0.0f &&
        t.frequency.ptr<float>()[row] == 0.0f) {
      return;
    }
    auto* counts = static_cast<int32_t*>(pool.scratch(worker, bytes));
    std::memset(counts, 0, bytes);
    penalise_row(t, row, counts);
  });
}

void apply_logit_bias(const TensorView& logits, const TokenLists& tokens,
                      const TensorView& values) {
  constexpr const char* kWhere = "nn.apply_logit_bias";
  check_logits(logits, kWhere);
  check_lists(tokens, logits, kWhere, "ids");
  check_shape(values, {tokens.ids.size(0)}, kWhere, "values");
  check_plain(values, DType::kFloat32, kWhere, "values");
  for (int64_t row = 0; row < logits.size(0); ++row) {
    float* out = row_of(logits, row);
    for_ids(tokens, row, [&](int32_t id, int32_t i) { out[id] += values.ptr<float>()[i]; });
  }
}

void mask_tokens(const TensorView& logits, const TokenLists& tokens) {
  constexpr const char* kWhere = "nn.mask_tokens";
  check_logits(logits, kWhere);
  check_lists(tokens, logits, kWhere, "ids");
  for (int64_t row = 0; row < logits.size(0); ++row) {
    float* out = row_of(logits, row);
    for_ids(tokens, row,
            [&](int32_t id, int32_t) { out[id] = -std::numeric_limits<float>::infinity(); });
  }
}

}  // namespace helicore::nn
