// The decode kernels of this folder, behind one table: the first that supports a call runs it.
#pragma once

#include <cstdint>

#include "helicore/attention/cuda/mla_cuda.h"

namespace helicore::attention::cuda {

inline constexpr int kMaxSplits = 256;

// Where a kernel leaves its results: `out` and `stats` of the call when there is one split, else
// partials that merge_splits folds.
struct SplitOutput {
  float* o = nullptr;      // [num_splits, T, H, R] normalised; unwritten where l is 0
  float* stats = nullptr;  // [num_splits, T, H, 2]
  int32_t num_splits = 1;
};

struct DecodeKernel {
  const char* name;
  // `fixed`: the caller fixes the splits, and a row's kernel must not depend on its batch.
  bool (*supports)(const MlaDecodeParams& params, const DecodeDevice& device, bool fixed);
  // Splits that suit these shapes, >= 1.
  int64_t (*num_splits)(const MlaDecodeParams& params, int64_t max_kv_len,
                        const DecodeDevice& device);
  void (*run)(const MlaDecodeParams& params, const SplitOutput& partial, Stream stream);
};

extern const DecodeKernel kPortableDecode;  // mla_decode.cu
extern const DecodeKernel kLatentDecode;    // mla_decode_sm90.cu
extern const DecodeKernel kRows64Decode;    // mla_decode_rows64.cu

// Folds the partials of every (token, head) row in ascending order of split (mla_merge.cu).
void merge_splits(const MlaDecodeParams& params, const SplitOutput& partial, Stream stream);

}  // namespace helicore::attention::cuda
