#include "helicore/attention/cuda/decode_dispatch.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::attention::cuda {
namespace {

// In order of preference; the last takes every call.
const DecodeKernel* const kDecodeKernels[] = {&kRows64Decode, &kLatentDecode, &kPortableDecode};

const DecodeKernel& choose(const MlaDecodeParams& params, const DecodeDevice& device, bool fixed) {
  for (const DecodeKernel* kernel : kDecodeKernels) {
    if (kernel->supports(params, device, fixed)) return *kernel;
  }
  return kPortableDecode;
}

}  // namespace

DecodeSplits plan_decode_splits(const MlaDecodeParams& params, int64_t max_kv_len,
                                const DecodeDevice& device, int32_t fixed_splits) {
  DecodeSplits splits;
  splits.kernel = &choose(params, device, fixed_splits > 0);
  if (params.num_tokens == 0 || params.num_heads == 0) return splits;
  const int64_t wanted =
      fixed_splits > 0 ? fixed_splits : splits.kernel->num_splits(params, max_kv_len, device);
  splits.num_splits = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, kMaxSplits));
  if (splits.num_splits > 1) {
    const size_t rows = static_cast<size_t>(splits.num_splits) *
                        static_cast<size_t>(params.num_tokens) *
                        static_cast<size_t>(params.num_heads);
    splits.workspace_bytes = rows * (static_cast<size_t>(params.cache.kv_lora_rank) + 2) * 4;
  }
  return splits;
}

void launch_mla_decode(const MlaDecodeParams& params, const DecodeSplits& splits, void* workspace,
                       Stream stream) {
  if (params.num_tokens == 0 || params.num_requests == 0) return;
  HELICORE_CHECK(splits.kernel != nullptr, "attention.mla_decode",
                 "splits must come from plan_decode_splits, got none");
  SplitOutput partial;
  partial.num_splits = splits.num_splits;
  if (splits.num_splits > 1) {
    HELICORE_CHECK(workspace != nullptr, "attention.mla_decode", "workspace of ",
                   splits.workspace_bytes, " bytes is missing");
    const int64_t rows = splits.num_splits * params.num_tokens * params.num_heads;
    partial.o = static_cast<float*>(workspace);
    partial.stats = partial.o + rows * params.cache.kv_lora_rank;
  }
  splits.kernel->run(params, partial, stream);
  if (splits.num_splits > 1) merge_splits(params, partial, stream);
}

}  // namespace helicore::attention::cuda
