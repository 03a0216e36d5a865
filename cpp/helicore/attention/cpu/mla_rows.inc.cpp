// Row-wise kernels: cache append (norm, rope, write), rope of queries, merge of partial results.
#include "helicore/attention/cpu/gather.inc.h"
#include "helicore/attention/cpu/kernels.h"

namespace helicore::attention::HELICORE_ISA_NS {
namespace {

template <class T>
inline VF load_upto(const T* p, int64_t left) {
  return left >= 16 ? load(p) : load_n(p, static_cast<int>(left));
}
template <class T>
inline void store_upto(T* p, VF x, int64_t left) {
  if (left >= 16) {
    store(p, x);
  } else {
    store_n(p, x, static_cast<int>(left));
  }
}

// rsqrt(mean(x^2) + eps), or 1 when there is no weight.
template <class T>
float norm_factor(const T* x, int64_t n, float eps, bool has_weight) {
  if (!has_weight) return 1.0f;
  VF sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const VF a = load_upto(x + i, n - i);
    sum = fma(a, a, sum);
  }
  return 1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(n) + eps);
}

// out[0 : n] = x * factor * weight, or x when weight is null.
template <class T, class W, class O>
void scale_row(const T* x, const W* weight, int64_t n, float factor, O* out) {
  const VF scale = set1(factor);
  for (int64_t i = 0; i < n; i += 16) {
    VF a = load_upto(x + i, n - i);
    if (weight != nullptr) a = mul(mul(a, scale), load_upto(weight + i, n - i));
    store_upto(out + i, a, n - i);
  }
}

inline constexpr int kMaxRopeDim = 1024;

// The two coordinates of each rotated plane, as floats.
struct RopeHalves {
  alignas(64) float first[kMaxRopeDim / 2 + 16];
  alignas(64) float second[kMaxRopeDim / 2 + 16];
};

// `x` may be `out`: a row is read before it is written.
template <class T, class O>
void rope_row(const T* x, const RopeTable& rope, int32_t position, RopeHalves& halves, O* out) {
  const int half = rope.dim / 2;
  store(halves.first + half / 16 * 16, zero());  // lanes past a tail are computed and dropped
  store(halves.second + half / 16 * 16, zero());
  if (rope.interleaved && rope.cos_sin != nullptr) {
    for (int i = 0; i < half; ++i) {
      halves.first[i] = static_cast<float>(x[2 * i]);
      halves.second[i] = static_cast<float>(x[2 * i + 1]);
    }
  } else {
    for (int i = 0; i < half; ++i) {
      halves.first[i] = static_cast<float>(x[i]);
      halves.second[i] = static_cast<float>(x[i + half]);
    }
  }
  const float* table = rope.cos_sin + int64_t{position} * rope.dim;
  for (int i = 0; i < half; i += 16) {
    const int left = half - i;
    VF a = load(halves.first + i);
    VF b = load(halves.second + i);
    if (rope.cos_sin != nullptr) {
      const VF c = load_upto(table + i, left);
      const VF s = load_upto(table + half + i, left);
      const VF rotated = sub(mul(a, c), mul(b, s));
      b = add(mul(b, c), mul(a, s));
      a = rotated;
    }
    store_upto(out + i, a, left);
    store_upto(out + half + i, b, left);
  }
}

// A row of a dense cache.
template <class T, class W, class O>
void append_dense(const MlaAppendParams& p, int64_t t, const T* x, const W* weight, float factor,
                  RopeHalves& rotated) {
  const MlaCache& cache = p.cache;
  const int64_t slot = p.slots[t];
  O* out = static_cast<O*>(cache.data) + slot / cache.page_size * cache.page_stride +
           slot % cache.page_size * cache.width();
  scale_row(x, weight, cache.kv_lora_rank, factor, out);
  if (cache.rope_dim > 0) {
    rope_row(x + cache.kv_lora_rank, p.rope, p.rope.cos_sin != nullptr ? p.positions[t] : 0,
             rotated, out + cache.kv_lora_rank);
  }
}

constexpr int64_t kPartValues = 128;  // of a row that are quantised at a time: whole groups

// Values [first, first + n) of the latent of token `offset`, n <= kPartValues.
inline void quantize_part(const MlaCache& cache, uint8_t* page, int64_t offset, int64_t first,
                          int64_t n, const float* values) {
  static_assert(kPartValues == kFp8DsMlaGroup && kPartValues % kNvFp4Group == 0);
  const CacheLayout& at = cache.layout;
  uint8_t* codes = page + offset * at.code_stride;
  uint8_t* scales = page + at.scale_begin + offset * at.scale_stride;
  if (cache.format == CacheFormat::kNvFp4) {
    quant::HELICORE_ISA_NS::quantize_nvfp4(values, n, cache.scale, codes + first / 2,
                                           scales + first / kNvFp4Group);
  } else if (cache.format == CacheFormat::kFp8DsMla) {
    const float scale = quant::HELICORE_ISA_NS::quantize_e4m3_group(values, n, codes + first);
    std::memcpy(scales + first / kFp8DsMlaGroup * 4, &scale, sizeof(scale));
  } else {
    quant::HELICORE_ISA_NS::quantize_e4m3(values, n, 1.0f / cache.scale, codes + first);
  }
}

// A row of a quantised cache: from float32, never by way of another format.
template <class T, class W>
void append_quantized(const MlaAppendParams& p, int64_t t, const T* x, const W* weight,
                      float factor, RopeHalves& rotated) {
  const MlaCache& cache = p.cache;
  const int64_t rank = cache.kv_lora_rank;
  const int64_t offset = p.slots[t] % cache.page_size;
  uint8_t* page =
      static_cast<uint8_t*>(cache.data) + p.slots[t] / cache.page_size * cache.page_stride;
  alignas(64) float values[kMaxRopeDim];
  for (int64_t first = 0; first < rank; first += kPartValues) {
    const int64_t n = min64(kPartValues, rank - first);
    scale_row(x + first, weight == nullptr ? nullptr : weight + first, n, factor, values);
    quantize_part(cache, page, offset, first, n, values);
  }
  if (cache.rope_dim == 0) return;
  const int32_t position = p.rope.cos_sin != nullptr ? p.positions[t] : 0;
  uint8_t* out = page + cache.layout.rope_begin + offset * cache.layout.rope_stride;
  if (cache.format == CacheFormat::kFp8) {
    rope_row(x + rank, p.rope, position, rotated, values);
    quant::HELICORE_ISA_NS::quantize_e4m3(values, cache.rope_dim, 1.0f / cache.scale, out);
  } else {
    rope_row(x + rank, p.rope, position, rotated, reinterpret_cast<BFloat16*>(out));
  }
}

template <class T, class W, class O>
void append_rows(const MlaAppendParams& p, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(p.norm_weight);
  RopeHalves rotated;
  for (int64_t t = begin; t < end; ++t) {
    if (p.slots[t] < 0) continue;
    const T* x = static_cast<const T*>(p.kv_a) + t * p.kv_a_stride;
    const float factor = norm_factor(x, p.cache.kv_lora_rank, p.eps, weight != nullptr);
    if constexpr (std::is_same_v<O, QuantizedRow>) {
      append_quantized(p, t, x, weight, factor, rotated);
    } else {
      append_dense<T, W, O>(p, t, x, weight, factor, rotated);
    }
  }
}

template <class T, class O>
void append_weight(const MlaAppendParams& p, int64_t begin, int64_t end) {
  if (p.norm_dtype == DType::kBFloat16) {
    append_rows<T, BFloat16, O>(p, begin, end);
  } else {
    append_rows<T, float, O>(p, begin, end);
  }
}

template <class T>
void append_cache(const MlaAppendParams& p, int64_t begin, int64_t end) {
  if (p.cache.format != CacheFormat::kDense) {
    append_weight<T, QuantizedRow>(p, begin, end);
  } else if (p.cache.dtype == DType::kBFloat16) {
    append_weight<T, BFloat16>(p, begin, end);
  } else {
    append_weight<T, float>(p, begin, end);
  }
}

template <class T>
void rope_all(const RopeRowsParams& p, int64_t begin, int64_t end) {
  RopeHalves row;
  for (int64_t t = begin; t < end; ++t) {
    for (int32_t h = 0; h < p.num_heads; ++h) {
      const T* x = static_cast<const T*>(p.in) + t * p.in_row_stride + h * p.in_head_stride;
      T* out = static_cast<T*>(p.out) + t * p.out_row_stride + h * p.out_head_stride;
      rope_row(x, p.rope, p.rope.cos_sin != nullptr ? p.positions[t] : 0, row, out);
    }
  }
}

template <class T>
void merge_rows(const MergeStatesParams& p, int64_t begin, int64_t end) {
  const float kEmpty = -std::numeric_limits<float>::infinity();
  alignas(64) float power[16];
  for (int64_t r = begin; r < end; ++r) {
    const T* a = static_cast<const T*>(p.o_a) + r * p.width;
    const T* b = static_cast<const T*>(p.o_b) + r * p.width;
    T* out = static_cast<T*>(p.out) + r * p.width;
    const float m_a = p.stats_a[r * 2];
    const float m_b = p.stats_b[r * 2];
    const float l_a = p.stats_a[r * 2 + 1];
    const float l_b = p.stats_b[r * 2 + 1];
    const bool has_a = l_a != 0.0f && m_a != kEmpty;
    const bool has_b = l_b != 0.0f && m_b != kEmpty;
    const float m = has_a ? (has_b && m_b > m_a ? m_b : m_a) : (has_b ? m_b : kEmpty);
    store(power, exp2_or_nan(set1(has_a ? m_a - m : kEmpty)));
    const float u_a = has_a ? l_a * power[0] : 0.0f;
    store(power, exp2_or_nan(set1(has_b ? m_b - m : kEmpty)));
    const float u_b = has_b ? l_b * power[0] : 0.0f;
    const float l = u_a + u_b;
    const float w_a = u_a == 0.0f ? 0.0f : u_a / l;
    const float w_b = u_b == 0.0f ? 0.0f : u_b / l;
    for (int64_t c = 0; c < p.width; c += 16) {
      const int64_t left = p.width - c;
      VF x = zero();  // a term of weight 0 is not read: its row may be NaN
      if (w_a != 0.0f) x = mul(set1(w_a), load_upto(a + c, left));
      if (w_b != 0.0f) x = fma(set1(w_b), load_upto(b + c, left), x);
      store_upto(out + c, x, left);
    }
    p.stats[r * 2] = m;
    p.stats[r * 2 + 1] = l;
  }
}

}  // namespace

void mla_append_rows(const MlaAppendParams& params, int64_t begin, int64_t end) {
  if (params.kv_a_dtype == DType::kBFloat16) {
    append_cache<BFloat16>(params, begin, end);
  } else {
    append_cache<float>(params, begin, end);
  }
}

void rope_rows(const RopeRowsParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kBFloat16) {
    rope_all<BFloat16>(params, begin, end);
  } else {
    rope_all<float>(params, begin, end);
  }
}

void merge_state_rows(const MergeStatesParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kBFloat16) {
    merge_rows<BFloat16>(params, begin, end);
  } else {
    merge_rows<float>(params, begin, end);
  }
}

}  // namespace helicore::attention::HELICORE_ISA_NS
