#include "helicore/core/cpu/isa.h"

#include <atomic>

#include "helicore/core/error.h"

namespace helicore {
namespace {

Isa detect() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Bf16;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

std::atomic<Isa>& active_slot() noexcept {
  static std::atomic<Isa> active{detect()};
  return active;
}

}  // namespace

std::string_view name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kGeneric:
      return "generic";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

Isa detected_isa() noexcept {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() noexcept { return active_slot().load(std::memory_order_relaxed); }

void set_isa(Isa isa) {
  if (isa > detected_isa()) {
    throw NotSupported(detail::concat("[core.set_isa] this CPU has no ", name_of(isa),
                                      "; its best level is ", name_of(detected_isa())));
  }
  active_slot().store(isa, std::memory_order_relaxed);
}

}  // namespace helicore
