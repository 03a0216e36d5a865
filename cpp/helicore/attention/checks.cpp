#include "helicore/attention/checks.h"

#include <bit>

#include "helicore/attention/mla.h"

namespace helicore::attention {

namespace {

// The rope width of rows of `width` elements; checks that the coding can have rows so wide.
int64_t rope_dim_of(const TensorView& pages, int64_t rank, const CacheCoding& coding,
                    const char* where) {
  const int64_t width = pages.size(2);
  if (coding.format == CacheFormat::kDense) {
    HELICORE_CHECK(pages.dtype == DType::kBFloat16 || pages.dtype == DType::kFloat32, where,
                   "cache must be bfloat16 or float32, got ", pages.describe());
    HELICORE_CHECK(width >= rank && width % 4 == 0, where, "cache rows must hold kv_lora_rank ",
                   rank, " plus a rope width that is a multiple of 4, got ", pages.describe());
    return width - rank;
  }
  HELICORE_CHECK(pages.dtype == DType::kUInt8, where, "cache must be uint8 in format ",
                 name_of(coding.format), ", got ", pages.describe());
  check_cache_widths(coding.format, rank, 0, where);
  const int64_t per_value = coding.format == CacheFormat::kFp8 ? 1 : 2;
  const int64_t rest = width - row_bytes(coding.format, rank, 0);
  HELICORE_CHECK(rest >= 0 && rest % (4 * per_value) == 0, where, "cache rows must have ",
                 row_bytes(coding.format, rank, 0), " bytes for kv_lora_rank ", rank, " and ",
                 per_value, " for each value of a rope width that is a multiple of 4 in format ",
                 name_of(coding.format), ", got ", pages.describe());
  return rest / per_value;
}

void check_coding(const MlaCache& cache, const char* where) {
  if (cache.format == CacheFormat::kDense || cache.format == CacheFormat::kFp8DsMla) {
    HELICORE_CHECK(cache.scale == 1.0f, where, "cache_scale must be 1 in format ",
                   name_of(cache.format), ", got ", cache.scale);
  } else {
    HELICORE_CHECK(cache.scale >= 0x1p-64f && cache.scale <= 0x1p64f, where,
                   "cache_scale must be in 2^-64..2^64, got ", cache.scale);
  }
  if (cache.format == CacheFormat::kNvFp4) {
    HELICORE_CHECK((std::bit_cast<uint32_t>(cache.scale) & 0x7fffffu) == 0, where,
                   "cache_scale must be a power of two in format nvfp4, got ", cache.scale);
  }
  if (cache.format != CacheFormat::kDense) {
    HELICORE_CHECK(reinterpret_cast<uintptr_t>(cache.data) % 4 == 0 && cache.page_stride % 4 == 0,
                   where, "cache pages must begin at multiples of 4 bytes, got a page stride of ",
                   cache.page_stride);
  }
}

}  // namespace

MlaCache make_mla_cache(const TensorView& pages, int64_t kv_lora_rank, const char* where,
                        const CacheCoding& coding) {
  nn::check_cpu(pages, where, "cache");
  check_shape(pages, {-1, -1, -1}, where, "cache");
  const int64_t page_size = pages.size(1);
  const int64_t width = pages.size(2);
  check_width(kv_lora_rank, 4, where, "kv_lora_rank");
  const int64_t rope_dim = rope_dim_of(pages, kv_lora_rank, coding, where);
  HELICORE_CHECK(page_size >= 1 && page_size <= (1 << 20), where,
                 "cache page_size must be in 1..1048576, got ", page_size);
  const bool one_page = pages.size(0) <= 1;
  HELICORE_CHECK(pages.stride(2) == 1 && (page_size == 1 || pages.stride(1) == width) &&
                     (one_page || pages.stride(0) >= page_size * width),
                 where, "cache must have contiguous pages, got strides (", pages.stride(0), ", ",
                 pages.stride(1), ", ", pages.stride(2), ") for ", pages.describe());
  MlaCache cache;
  cache.data = pages.data;
  cache.dtype = pages.dtype;
  cache.format = coding.format;
  cache.page_size = static_cast<int32_t>(page_size);
  cache.kv_lora_rank = static_cast<int32_t>(kv_lora_rank);
  cache.rope_dim = static_cast<int32_t>(rope_dim);
  cache.num_pages = pages.size(0);
  cache.page_stride = one_page ? page_size * width : pages.stride(0);
  cache.row_bytes = width * static_cast<int64_t>(size_of(pages.dtype));
  cache.scale = coding.scale;
  if (coding.format != CacheFormat::kDense) {
    cache.layout = cache_layout(coding.format, kv_lora_rank, rope_dim, page_size);
  }
  check_coding(cache, where);
  return cache;
}

RaggedBatch check_batch(const TensorView& block_table, const TensorView& cu_q,
                        const TensorView& kv_len, int64_t num_tokens, const char* where) {
  nn::check_plain(kv_len, DType::kInt32, where, "kv_len");
  check_shape(kv_len, {-1}, where, "kv_len");
  const int64_t num_requests = kv_len.size(0);
  HELICORE_CHECK(num_requests <= kMaxRows, where, "kv_len has too many requests, got ",
                 kv_len.describe());
  nn::check_plain(cu_q, DType::kInt32, where, "cu_q");
  check_shape(cu_q, {num_requests + 1}, where, "cu_q");
  nn::check_cpu(block_table, where, "block_table");
  check_dtype(block_table, DType::kInt32, where, "block_table");
  check_shape(block_table, {num_requests, -1}, where, "block_table");
  HELICORE_CHECK(block_table.size(1) <= 1 || block_table.stride(1) == 1, where,
                 "block_table must have contiguous rows, got stride ", block_table.stride(1));
  RaggedBatch batch;
  batch.block_table = block_table.ptr<const int32_t>();
  batch.block_table_stride = block_table.stride(0);
  batch.max_pages = block_table.size(1);
  batch.cu_q = cu_q.ptr<const int32_t>();
  batch.kv_len = kv_len.ptr<const int32_t>();
  batch.num_requests = static_cast<int32_t>(num_requests);
  HELICORE_CHECK(batch.cu_q[0] == 0, where, "cu_q must start at 0, got ", batch.cu_q[0]);
  for (int32_t b = 0; b < batch.num_requests; ++b) {
    HELICORE_CHECK(batch.cu_q[b + 1] >= batch.cu_q[b], where, "cu_q must not decrease, got ",
                   batch.cu_q[b], " then ", batch.cu_q[b + 1], " at request ", b);
    HELICORE_CHECK(batch.kv_len[b] >= 0, where, "kv_len must be >= 0, got ", batch.kv_len[b],
                   " at request ", b);
  }
  HELICORE_CHECK(batch.cu_q[num_requests] == num_tokens, where, "cu_q must end at the ", num_tokens,
                 " tokens of q, got ", batch.cu_q[num_requests]);
  return batch;
}

void check_pages(const RaggedBatch& batch, const MlaCache& cache, int32_t request,
                 int64_t num_tokens, const char* where) {
  const int64_t pages = (num_tokens + cache.page_size - 1) / cache.page_size;
  HELICORE_CHECK(pages <= batch.max_pages, where, "block_table has room for ", batch.max_pages,
                 " pages of ", cache.page_size, " tokens, but request ", request, " has ",
                 num_tokens, " tokens");
  const int32_t* ids = batch.block_table + request * batch.block_table_stride;
  const int64_t bad = first_outside(ids, pages, cache.num_pages);
  HELICORE_CHECK(bad < 0, where, "block_table must hold page ids in 0..", cache.num_pages - 1,
                 " for the tokens of a request, got ", ids[bad], " as page ", bad, " of request ",
                 request);
}

float* check_stats(const TensorView* stats, int64_t num_tokens, int64_t num_heads,
                   const char* where) {
  if (stats == nullptr) return nullptr;
  nn::check_plain(*stats, DType::kFloat32, where, "stats");
  check_shape(*stats, {num_tokens, num_heads, 2}, where, "stats");
  return stats->ptr<float>();
}

RopeTable check_rope(const TensorView* cos_sin, const TensorView* positions, int64_t num_tokens,
                     int64_t rope_dim, bool interleaved, const char* where) {
  RopeTable rope;
  rope.dim = static_cast<int32_t>(rope_dim);
  rope.interleaved = interleaved;
  HELICORE_CHECK(rope_dim <= 1024, where, "the rope width must be at most 1024, got ", rope_dim);
  if (cos_sin == nullptr || rope_dim == 0) return rope;
  nn::check_plain(*cos_sin, DType::kFloat32, where, "cos_sin");
  check_shape(*cos_sin, {-1, rope_dim}, where, "cos_sin");
  HELICORE_CHECK(positions != nullptr, where, "positions must be given with cos_sin, got None");
  nn::check_plain(*positions, DType::kInt32, where, "positions");
  check_shape(*positions, {num_tokens}, where, "positions");
  rope.cos_sin = cos_sin->ptr<const float>();
  rope.max_pos = cos_sin->size(0);
  const int32_t* p = positions->ptr<const int32_t>();
  const int64_t bad = first_outside(p, num_tokens, rope.max_pos);
  HELICORE_CHECK(bad < 0, where, "positions must be in 0..", rope.max_pos - 1,
                 " (rows of cos_sin), got ", p[bad], " at token ", bad);
  return rope;
}

}  // namespace helicore::attention
