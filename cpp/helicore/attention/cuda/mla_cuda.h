// CUDA launches of the latent-attention kernels. Each takes the parameter struct of its CPU twin
// (mla_params.h), with device pointers. None allocates or synchronises; a launch that the driver
// refuses throws CudaError. Portable kernels take any widths that are multiples of 4; decode has a
// tuned one beside it (decode_dispatch.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "helicore/attention/mla_params.h"

namespace helicore::attention::cuda {

// An opaque cudaStream_t, so that callers need no CUDA header; null is the default stream.
using Stream = void*;

// Rows of one request as elements: out[i] = the row of its token i.
struct GatherRowsParams {
  MlaCache cache;                  // of a quantised format
  const int32_t* pages = nullptr;  // [ceil(num_tokens / page_size)]
  int64_t num_tokens = 0;
  void* out = nullptr;  // [num_tokens, E]
  DType out_dtype = DType::kBFloat16;
};

void launch_mla_append(const MlaAppendParams& params, Stream stream);
// Of a quantised cache; launch_mla_append comes here.
void launch_append_coded(const MlaAppendParams& params, Stream stream);
void launch_gather_rows(const GatherRowsParams& params, Stream stream);
void launch_rope_rows(const RopeRowsParams& params, Stream stream);
void launch_merge_states(const MergeStatesParams& params, Stream stream);

struct DecodeKernel;  // decode_dispatch.h

// What the choice of a kernel depends on, besides shapes and dtypes.
struct DecodeDevice {
  int32_t num_sms = 0;
  int32_t compute_major = 0;
};

// How a decode call is cut: every row's tokens go to `num_splits` equal ranges. The count depends
// on shapes alone, never on lengths, so a launch can be captured in a graph and replayed while
// sequences grow.
struct DecodeSplits {
  const DecodeKernel* kernel = nullptr;  // the one that runs the call
  int32_t num_splits = 1;
  size_t workspace_bytes = 0;  // partial results; 0 when num_splits is 1
};

// `max_kv_len` bounds every row's length (block table width times page size). With `fixed_splits` >
// 0 that many are used, which makes a row's bits independent of its batch.
[[nodiscard]] DecodeSplits plan_decode_splits(const MlaDecodeParams& params, int64_t max_kv_len,
                                              const DecodeDevice& device, int32_t fixed_splits = 0);

// `workspace` holds plan_decode_splits(...).workspace_bytes device bytes, 16-byte aligned; may be
// null when that is 0.
void launch_mla_decode(const MlaDecodeParams& params, const DecodeSplits& splits, void* workspace,
                       Stream stream);

}  // namespace helicore::attention::cuda
