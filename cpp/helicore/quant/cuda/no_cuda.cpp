// The CPU build's twin of the launches: the checked entries reach these and get a clear refusal.
#include "helicore/core/error.h"
#include "helicore/quant/cuda/norm_quantize.h"

namespace helicore::quant::cuda {

void launch_norm_quantize(const EpilogueParams& /*params*/, const void* /*x*/, DType /*dtype*/,
                          const RowShape& /*shape*/, Stream /*stream*/) {
  throw NotSupported(
      "[quant.norm_quantize] this build has no CUDA kernels; build with nvcc on PATH (CMake option "
      "HELICORE_CUDA=ON)");
}

}  // namespace helicore::quant::cuda
