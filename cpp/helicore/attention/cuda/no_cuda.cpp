// The CPU build's twin of the launches: the checked entries reach these and get a clear refusal.
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/core/error.h"

namespace helicore::attention::cuda {
namespace {

[[noreturn]] void refuse(const char* op) {
  throw NotSupported(detail::concat("[attention.", op,
                                    "] this build has no CUDA kernels; build with nvcc on PATH "
                                    "(CMake option HELICORE_CUDA=ON)"));
}

}  // namespace

void launch_mla_append(const MlaAppendParams&, Stream) { refuse("mla_append"); }
void launch_gather_rows(const GatherRowsParams&, Stream) { refuse("gather_rows"); }
void launch_rope_rows(const RopeRowsParams&, Stream) { refuse("rope_q"); }
void launch_merge_states(const MergeStatesParams&, Stream) { refuse("merge_states"); }
DecodeSplits plan_decode_splits(const MlaDecodeParams&, int64_t, const DecodeDevice&, int32_t) {
  refuse("mla_decode");
}
void launch_mla_decode(const MlaDecodeParams&, const DecodeSplits&, void*, Stream) {
  refuse("mla_decode");
}

}  // namespace helicore::attention::cuda
