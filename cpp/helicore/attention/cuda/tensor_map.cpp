#include "helicore/attention/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kColumns = 64;  // of a copy: 128 bytes

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  constexpr unsigned kSince = 12000;  // the CUDA version that brought it
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  helicore::cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince,
                                                         cudaEnableDefault, &status),
                        "cuTensorMapEncodeTiled");
  if (found == nullptr) {
    throw NotSupported("[attention.cuda] the CUDA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(found);
}

}  // namespace

CUtensorMap cache_tensor_map(const MlaCache& cache, int box_rows) {
  static const Encode encode = find_encode();
  const auto row_bytes = static_cast<cuuint64_t>(cache.width()) * 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cache.width()),
                              static_cast<cuuint64_t>(cache.page_size),
                              static_cast<cuuint64_t>(cache.num_pages)};
  const cuuint64_t strides[] = {row_bytes, static_cast<cuuint64_t>(cache.page_stride) * 2};
  const cuuint32_t box[] = {kColumns, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult code =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, cache.data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    throw CudaError(
        static_cast<int>(code),
        detail::concat("[attention.cuda] a tensor map of ", cache.num_pages, " pages of ",
                       cache.page_size, " rows was refused: code ", static_cast<int>(code)));
  }
  return map;
}

}  // namespace helicore::attention::cuda
