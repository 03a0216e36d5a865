// Packing of linear weights (declared in linear.h).
#include <cstring>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/linear.h"

namespace helicore::nn {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sizes that pack_linear() and unpack_linear() share.
struct PackShape {
  int64_t matrices = 1;
  int64_t rows = 0;        // N
  int64_t k = 0;           // K
  int64_t group_rows = 0;  // N / groups
  int64_t group_blocks = 0;
  int64_t blocks = 0;
  int64_t block_numel = 0;
};

// Element offset of (k, column of the block) in a block.
int64_t offset_in_block(bool pairs, int64_t k, int64_t column) {
  return pairs ? (k / 2 * 16 + column) * 2 + k % 2 : k * 16 + column;
}

PackShape check_pack(const TensorView& weight, const TensorView& packed, int64_t groups,
                     const char* where) {
  HELICORE_CHECK(weight.ndim >= 2, where, "weight must be [..., N, K], got ", weight.describe());
  HELICORE_CHECK(weight.dtype == DType::kBFloat16 || weight.dtype == DType::kFloat32, where,
                 "weight must be bfloat16 or float32, got ", weight.describe());
  check_dtype(packed, weight.dtype, where, "packed");
  check_contiguous(packed, where, "packed");
  check_cpu(weight, where, "weight");
  check_cpu(packed, where, "packed");
  PackShape s;
  s.rows = weight.size(-2);
  s.k = weight.size(-1);
  HELICORE_CHECK(groups >= 1 && s.rows % groups == 0, where, "groups must divide the ", s.rows,
                 " rows of weight, got ", groups);
  for (int d = 0; d < weight.ndim - 2; ++d) s.matrices *= weight.shape[d];
  s.group_rows = s.rows / groups;
  s.group_blocks = ceil_div(s.group_rows, kPackBlock);
  s.blocks = s.group_blocks * groups;
  s.block_numel = PackedWeight{nullptr, weight.dtype, s.rows, s.k}.block_stride();
  HELICORE_CHECK(packed.numel() == s.matrices * s.blocks * s.block_numel, where,
                 "packed must hold ", s.matrices * s.blocks * s.block_numel, " elements for ",
                 weight.describe(), ", got ", packed.describe());
  return s;
}

int64_t matrix_offset(const TensorView& weight, int64_t matrix) {
  int64_t offset = 0;
  for (int d = weight.ndim - 3; d >= 0; --d) {
    offset += matrix % weight.shape[d] * weight.strides[d];
    matrix /= weight.shape[d];
  }
  return offset;
}

// Calls fn(weight offset of (row, k), packed offset of (row, k)) over one packed block.
template <typename Fn>
void for_each_in_block(const TensorView& weight, const PackShape& s, int64_t task, Fn&& fn) {
  const bool pairs = weight.dtype == DType::kBFloat16;
  const int64_t matrix = task / s.blocks;
  const int64_t block = task % s.blocks;
  const int64_t group = block / s.group_blocks;
  const int64_t first = block % s.group_blocks * kPackBlock;
  const int64_t base = matrix_offset(weight, matrix);
  for (int64_t c = 0; c < kPackBlock && first + c < s.group_rows; ++c) {
    const int64_t row = base + (group * s.group_rows + first + c) * weight.stride(-2);
    for (int64_t k = 0; k < s.k; ++k) {
      fn(row + k * weight.stride(-1), task * s.block_numel + offset_in_block(pairs, k, c));
    }
  }
}

}  // namespace

int64_t packed_numel(DType dtype, int64_t out_features, int64_t in_features, int64_t groups) {
  const int64_t blocks = groups * ceil_div(out_features / groups, kPackBlock);
  return blocks * PackedWeight{nullptr, dtype, out_features, in_features}.block_stride();
}

void pack_linear(const TensorView& weight, const TensorView& packed, int64_t groups) {
  const PackShape s = check_pack(weight, packed, groups, "nn.pack_linear");
  const size_t element = size_of(weight.dtype);
  default_pool().parallel_for(s.matrices * s.blocks, [&](int64_t task) {
    char* block = packed.ptr<char>() + task * s.block_numel * static_cast<int64_t>(element);
    std::memset(block, 0, static_cast<size_t>(s.block_numel) * element);
    for_each_in_block(weight, s, task, [&](int64_t from, int64_t to) {
      if (element == 2) {
        packed.ptr<BFloat16>()[to] = weight.ptr<BFloat16>()[from];
      } else {
        packed.ptr<float>()[to] = weight.ptr<float>()[from];
      }
    });
  });
}

void unpack_linear(const TensorView& packed, const TensorView& weight, int64_t groups) {
  const PackShape s = check_pack(weight, packed, groups, "nn.unpack_linear");
  default_pool().parallel_for(s.matrices * s.blocks, [&](int64_t task) {
    for_each_in_block(weight, s, task, [&](int64_t to, int64_t from) {
      if (weight.dtype == DType::kBFloat16) {
        weight.ptr<BFloat16>()[to] = packed.ptr<BFloat16>()[from];
      } else {
        weight.ptr<float>()[to] = packed.ptr<float>()[from];
      }
    });
  });
}

PackedWeight packed_weight(const TensorView& packed, int64_t out_features, int64_t in_features,
                           const char* where, const char* name, int64_t groups) {
  HELICORE_CHECK(packed.dtype == DType::kBFloat16 || packed.dtype == DType::kFloat32, where, name,
                 " must be bfloat16 or float32, got ", packed.describe());
  check_cpu(packed, where, name);
  check_contiguous(packed, where, name);
  const bool pairs = packed.dtype == DType::kBFloat16;
  HELICORE_CHECK(out_features >= 0 && out_features % groups == 0, where,
                 "out_features must be >= 0 ", "and a multiple of ", groups, ", got ",
                 out_features);
  const int64_t blocks = groups * ceil_div(out_features / groups, kPackBlock);
  const int64_t k_steps = pairs ? (in_features + 1) / 2 : in_features;
  const bool fits = packed.ndim == (pairs ? 4 : 3) && packed.size(0) == blocks &&
                    packed.size(1) == k_steps && packed.size(2) == kPackBlock &&
                    (!pairs || packed.size(3) == 2);
  HELICORE_CHECK(fits, where, name, " must be the packed form of a [", out_features, ", ",
                 in_features, "] weight: [", blocks, ", ", k_steps, ", 16", pairs ? ", 2" : "",
                 "], got ", packed.describe());
  return PackedWeight{packed.data, packed.dtype, out_features, in_features};
}

}  // namespace helicore::nn
