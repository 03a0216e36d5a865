// The CPU build's twin of the launches: the checked entries reach these and get a clear refusal.
#include "helicore/core/error.h"
#include "helicore/nn/cuda/elementwise.h"

namespace helicore::nn::cuda {
namespace {

[[noreturn]] void refuse(const char* op) {
  throw NotSupported(helicore::detail::concat("[nn.", op,
                                              "] this build has no CUDA kernels; build with nvcc "
                                              "on PATH (CMake option HELICORE_CUDA=ON)"));
}

}  // namespace

void launch_rms_norm(const NormParams&, Stream) { refuse("rms_norm"); }
void launch_silu_mul(const GateParams&, Stream) { refuse("silu_mul"); }

}  // namespace helicore::nn::cuda
