// Descriptors of tensor copies: how the copy engine of sm_90 finds tiles of a paged cache.
#pragma once

#include <cuda.h>

#include "helicore/attention/mla_params.h"

namespace helicore::attention::cuda {

// The cache as [num_pages, page_size, E] bfloat16; a copy brings 64 columns of box_rows rows of a
// page, swizzled by 128 bytes. Throws CudaError if the driver refuses the shape.
[[nodiscard]] CUtensorMap cache_tensor_map(const MlaCache& cache, int box_rows);

}  // namespace helicore::attention::cuda
