// The CPU build's twin of the launches: the checked entries reach these and get a clear refusal.
#include "helicore/core/error.h"
#include "helicore/moe/cuda/routing.h"

namespace helicore::moe::cuda {
namespace {

[[noreturn]] void refuse(const char* op) {
  throw NotSupported(helicore::detail::concat("[moe.", op,
                                              "] this build has no CUDA kernels; build with nvcc "
                                              "on PATH (CMake option HELICORE_CUDA=ON)"));
}

}  // namespace

void launch_select(const SelectParams&, Stream) { refuse("select_experts"); }
void launch_sort(const SortParams&, Stream) { refuse("sort_by_expert"); }
void launch_combine(const CombineParams&, Stream) { refuse("combine"); }

}  // namespace helicore::moe::cuda
