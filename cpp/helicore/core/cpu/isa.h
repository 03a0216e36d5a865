// Which instruction set the CPU kernels run on: chosen once at run time, may be lowered for tests.
#pragma once

#include <string_view>

namespace helicore {

// Ascending: each level includes the ones before it.
enum class Isa { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

[[nodiscard]] std::string_view name_of(Isa isa) noexcept;
// The best level that this CPU has.
[[nodiscard]] Isa detected_isa() noexcept;
// The level in use: detected_isa() unless set_isa() lowered it.
[[nodiscard]] Isa active_isa() noexcept;
// Throws NotSupported when the CPU lacks `isa`. Call while no kernel runs.
void set_isa(Isa isa);

}  // namespace helicore

// HELICORE_DISPATCH_ISA(kernel(args...)): calls helicore::<ns of this isa>::kernel. Use inside
// namespace helicore::<area>, where each variant declares `namespace avx2 { ... }`; see
// core/cpu/simd.h.
#if defined(__x86_64__)
#define HELICORE_DISPATCH_ISA(call)      \
  [&] {                                  \
    switch (::helicore::active_isa()) {  \
      case ::helicore::Isa::kAvx512Bf16: \
        return isa_avx512bf16::call;     \
      case ::helicore::Isa::kAvx512:     \
        return isa_avx512::call;         \
      case ::helicore::Isa::kAvx2:       \
        return isa_avx2::call;           \
      case ::helicore::Isa::kGeneric:    \
        break;                           \
    }                                    \
    return isa_generic::call;            \
  }()
// HELICORE_DECLARE_ISA(void f(int);) declares f once per variant.
#define HELICORE_DECLARE_ISA(...) \
  namespace isa_generic {         \
  __VA_ARGS__                     \
  }                               \
  namespace isa_avx2 {            \
  __VA_ARGS__                     \
  }                               \
  namespace isa_avx512 {          \
  __VA_ARGS__                     \
  }                               \
  namespace isa_avx512bf16 {      \
  __VA_ARGS__                     \
  }
#else
#define HELICORE_DISPATCH_ISA(call) isa_generic::call
#define HELICORE_DECLARE_ISA(...) \
  namespace isa_generic {         \
  __VA_ARGS__                     \
  }
#endif
