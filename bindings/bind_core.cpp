#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "casters.h"
#include "helicore/core/cpu/isa.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"
#include "helicore/core/ledger.h"
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

template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Ledger make_ledger(int64_t block, int64_t world) {
  HELICORE_CHECK(block >= 1, "Ledger", "block must be >= 1, got ", block);
  HELICORE_CHECK(world >= 1, "Ledger", "world must be >= 1, got ", world);
  return {block, world};
}

int64_t check_position(int64_t value, const char* name) {
  HELICORE_CHECK(value >= 0, "Ledger", name, " must be >= 0, got ", value);
  return value;
}

int64_t check_rank(const Ledger& ledger, int64_t rank) {
  HELICORE_CHECK(rank >= 0 && rank < ledger.world, "Ledger", "rank must be in 0..",
                 ledger.world - 1, ", got ", rank);
  return rank;
}

void fill_rows(const Ledger& ledger, int64_t rank, const Vector<const int32_t>& positions,
               const Vector<const int32_t>& pages, const Vector<int64_t>& slots,
               const Vector<int32_t>& bounds) {
  check_rank(ledger, rank);
  const size_t count = positions.shape(0);
  HELICORE_CHECK(pages.shape(0) == count && slots.shape(0) == count && bounds.shape(0) == count,
                 "Ledger.fill_rows", "pages, slots and bounds must have the ", count,
                 " elements of positions, got ", pages.shape(0), ", ", slots.shape(0), " and ",
                 bounds.shape(0));
  for (size_t i = 0; i < count; ++i) {
    const int64_t position = check_position(positions.data()[i], "positions");
    const bool is_mine = ledger.owner(position) == rank;
    slots.data()[i] =
        is_mine ? pages.data()[i] * ledger.block + position % ledger.block : int64_t{-1};
    bounds.data()[i] = static_cast<int32_t>(ledger.local_len(position + 1, rank));
  }
}

void bind_ledger(nb::module_& m) {
  nb::class_<Ledger>(m, "Ledger",
                     "Which rank of a context-parallel group keeps which position of a sequence: "
                     "blocks of `block` positions go to the `world` ranks in turn.")
      .def(
          "__init__",
          [](Ledger* self, int64_t block, int64_t world) {
            new (self) Ledger(make_ledger(block, world));
          },
          "block"_a, "world"_a, "Raises ValueError unless both are >= 1.")
      .def_ro("block", &Ledger::block, "Positions that go to one rank in a row.")
      .def_ro("world", &Ledger::world, "Ranks.")
      .def_prop_ro("super_block", &Ledger::super_block, "block * world positions.")
      .def(
          "owner",
          [](const Ledger& self, int64_t position) {
            return self.owner(check_position(position, "position"));
          },
          "position"_a, "The rank that keeps a position.")
      .def(
          "slot",
          [](const Ledger& self, int64_t position) {
            return self.slot(check_position(position, "position"));
          },
          "position"_a, "The row of a position on its owner.")
      .def(
          "local_len",
          [](const Ledger& self, int64_t length, int64_t rank) {
            return self.local_len(check_position(length, "length"), check_rank(self, rank));
          },
          "length"_a, "rank"_a, "Rows that `rank` keeps of the first `length` positions.")
      .def(
          "position",
          [](const Ledger& self, int64_t slot, int64_t rank) {
            return self.position(check_position(slot, "slot"), check_rank(self, rank));
          },
          "slot"_a, "rank"_a, "The position of row `slot` of `rank`.")
      .def(
          "fill_rows", &fill_rows, "rank"_a, "positions"_a, "pages"_a, "slots"_a, "bounds"_a,
          "For tokens at positions int32 [T], whose super-blocks are the pages int32 [T] of\n"
          "`block` rows on `rank`: slots int64 [T] gets page * block + offset where the rank "
          "keeps\n"
          "the token, else -1; bounds int32 [T] the rows of the rank that the token sees, its own\n"
          "included.");
}

}  // namespace

void bind_core(nb::module_& m) {
  bind_ledger(m);
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
