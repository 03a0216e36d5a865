#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "casters.h"
#include "helicore/core/cpu/isa.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

Isa isa_of(const std::string& name) {
  for (Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (name_of(isa) == name) return isa;
  }
  detail::throw_invalid("core.set_isa", detail::concat("isa must be one of generic, avx2, avx512, "
                                                       "avx512bf16, got '",
                                                       name, "'"));
}

}  // namespace

void bind_core(nb::module_& m) {
  m.def("num_threads", &num_threads, "Threads of the CPU kernel pool, the calling one included.");
  m.def("set_num_threads", &set_num_threads, "num_threads"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Resize the CPU kernel pool. Raises ValueError unless 1 <= num_threads <= 1024.");
  m.def(
      "detected_isa", [] { return std::string(name_of(detected_isa())); },
      "Best instruction set of this CPU: generic, avx2, avx512 or avx512bf16.");
  m.def(
      "active_isa", [] { return std::string(name_of(active_isa())); },
      "Instruction set that the CPU kernels use.");
  m.def(
      "set_isa", [](const std::string& isa) { set_isa(isa_of(isa)); }, "isa"_a,
      "Lower (or restore) the instruction set of the CPU kernels.\n\n"
      "Raises ValueError for an unknown name and NotSupportedError when the CPU lacks it.");
  m.def("cuda_compiled", &cuda::compiled, "Whether this build holds CUDA kernels.");
  m.def("cuda_device_count", &cuda::device_count,
        "CUDA devices that can be used now; 0 without a GPU, a driver or CUDA kernels.");
  m.def(
      "describe", [](const TensorView& tensor) { return tensor.describe(); }, "tensor"_a,
      "Shape, dtype and device as the native code sees them, e.g. 'bfloat16[2, 8] on cpu'.");
}

}  // namespace helicore::bindings
