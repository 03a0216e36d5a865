// Latent attention on CUDA tensors: the checked entries, twins of those in attention/mla.h.
//
// Shapes, dtypes and devices are checked; lengths, slots and page ids stay on the device and are
// trusted, since reading them would wait for the GPU. All tensors of a call are on one device. Work
// is queued on `stream`; nothing synchronises. In a build without CUDA each entry throws
// NotSupported.
#pragma once

#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/mla.h"

namespace helicore::attention::cuda {

void mla_append(const MlaAppendArgs& args, Stream stream);

struct GatherRowsArgs {
  TensorView cache;          // uint8 [num_pages, page_size, row_bytes]
  TensorView pages;          // [n] int32, the first pages of a request
  TensorView out;            // [T, R + dr], bfloat16 or float32, written: the first T tokens
  int64_t kv_lora_rank = 0;  // R
  CacheCoding coding = {};
};
// Rows of a quantised cache as elements.
void gather_rows(const GatherRowsArgs& args, Stream stream);
void rope_q(const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
            bool interleaved, Stream stream);
void merge_states(const MergeStatesArgs& args, Stream stream);

// Bytes of workspace that mla_decode needs for these shapes; `fixed_splits` > 0 fixes the split
// count, so that a row's bits do not depend on its batch.
[[nodiscard]] size_t decode_workspace_bytes(const MlaDecodeArgs& args, int32_t fixed_splits);
// `workspace` is a uint8 tensor of at least that many bytes, 16-byte aligned; null when none is
// needed.
void mla_decode(const MlaDecodeArgs& args, int32_t fixed_splits, const TensorView* workspace,
                Stream stream);

}  // namespace helicore::attention::cuda
