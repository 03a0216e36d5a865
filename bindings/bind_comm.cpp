#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "casters.h"
#include "gil.h"
#include "helicore/comm/communicator.h"
#include "helicore/comm/cuda/device_communicator.h"
#include "helicore/comm/symmetric_memory.h"
#include "norm_arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using comm::Communicator;
using comm::Segment;

std::unique_ptr<Communicator> connect(std::shared_ptr<Segment> segment,
                                      const std::vector<nb::bytes>& handles, double timeout_s) {
  std::vector<std::string> texts;
  for (const nb::bytes& handle : handles) texts.emplace_back(handle.c_str(), handle.size());
  return std::make_unique<Communicator>(comm::map_segments(std::move(segment), texts), timeout_s);
}

std::vector<std::unique_ptr<Communicator>> make_virtual(int world_size, size_t num_bytes,
                                                        double timeout_s) {
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (auto& memory : comm::make_local_memory(world_size, num_bytes)) {
    ranks.push_back(std::make_unique<Communicator>(std::move(memory), timeout_s));
  }
  return ranks;
}

void all_reduce_fused(Communicator& self, quant::AllReduceFusion fusion, const TensorView& x,
                      const NormArguments& arguments) {
  const nb::gil_scoped_release release;
  self.all_reduce_fused(fusion, x, arguments.tensors());
}

nb::bytes broadcast_bytes(Communicator& self, const std::optional<nb::bytes>& data, int root,
                          bool wait_forever) {
  std::optional<std::string_view> view;
  if (data) view.emplace(data->c_str(), data->size());
  std::string result;
  {
    const nb::gil_scoped_release release;
    result = self.broadcast_bytes(view, root, wait_forever);
  }
  return nb::bytes(result.data(), result.size());
}

void bind_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment",
                      "This rank's memory that other processes of the machine map. It has no name "
                      "in the file system: nothing is left of it, whatever way processes end.")
      .def(nb::init<int, int, size_t>(), "rank"_a, "world_size"_a, "num_bytes"_a = size_t{64} << 20,
           "Raises ValueError naming the argument, MemoryError when there is no such memory.")
      .def_prop_ro("rank", &Segment::rank)
      .def_prop_ro("world_size", &Segment::world_size)
      .def_prop_ro("num_bytes", &Segment::num_bytes)
      .def_prop_ro(
          "handle",
          [](const Segment& self) {
            const std::string handle = self.handle();
            return nb::bytes(handle.data(), handle.size());
          },
          "What peers need to map this memory.");
}

using comm::cuda::DeviceCommunicator;
using comm::cuda::Shots;

std::vector<std::unique_ptr<DeviceCommunicator>> make_virtual_on_gpu(int world_size, int device,
                                                                     size_t num_bytes,
                                                                     double timeout_s,
                                                                     int max_blocks) {
  std::vector<std::unique_ptr<DeviceCommunicator>> ranks;
  for (auto& memory : comm::cuda::make_local_device_memory(device, world_size, num_bytes)) {
    ranks.push_back(std::make_unique<DeviceCommunicator>(
        std::move(memory), device, comm::cuda::DeviceOptions{timeout_s, max_blocks, world_size}));
  }
  return ranks;
}

void bind_device_communicator(nb::module_& m) {
  nb::enum_<Shots>(m, "Shots", "How an all-reduce on GPUs goes about it.")
      .value("AUTO", Shots::kAuto, "by the bytes of a call")
      .value("ONE", Shots::kOne, "every rank sends its rows to all and sums them all")
      .value("TWO", Shots::kTwo, "every rank sums a share and sends the sums to all");
  nb::class_<DeviceCommunicator>(
      m, "DeviceCommunicator",
      "One of W ranks that address each other's GPU memory. All ranks make the same calls in the\n"
      "same order, each in one stream, torch's current one; calls may be captured into graphs.\n"
      "Tensors are contiguous, on the communicator's device.\n\n"
      "A rank that waits longer than the time limit gives up: check() and later calls raise\n"
      "CommError naming the rank that did not come.")
      .def_static(
          "virtual", &make_virtual_on_gpu, "world_size"_a, "device"_a = 0,
          "num_bytes"_a = size_t{64} << 20, "timeout_s"_a = 10.0, "max_blocks"_a = 0,
          nb::call_guard<nb::gil_scoped_release>(),
          "Communicators for streams of one GPU, with num_bytes of it each.\n\n"
          "max_blocks: blocks of a call of one rank; those of all ranks must be on the GPU\n"
          "at once. 0: its multiprocessors, divided by the ranks.")
      .def_prop_ro("rank", &DeviceCommunicator::rank)
      .def_prop_ro("world_size", &DeviceCommunicator::world_size)
      .def(
          "all_reduce",
          [](DeviceCommunicator& self, const TensorView& x, const TensorView& out, Shots shots) {
            self.all_reduce(x, out, current_cuda_stream(x.device), shots);
          },
          "x"_a, "out"_a, "shots"_a = Shots::kAuto,
          "out = the sum of x [T, H] over the ranks: in float32 in the order of ranks, rounded\n"
          "once, -0 made +0, the same bits on every rank. float32 or bfloat16; out may be x.")
      .def(
          "all_reduce_fused",
          [](DeviceCommunicator& self, quant::AllReduceFusion fusion, const TensorView& x,
             OptionalTensor residual, OptionalTensor residual_out, OptionalTensor weight,
             OptionalTensor norm, OptionalTensor codes, OptionalTensor scales, float scale,
             float eps, int64_t leading_dim, Shots shots) {
            const NormArguments arguments{residual, residual_out, weight, norm,       codes,
                                          scales,   scale,        eps,    leading_dim};
            self.all_reduce_fused(fusion, x, arguments.tensors(), current_cuda_stream(x.device),
                                  shots);
          },
          "fusion"_a, "x"_a, "residual"_a = nb::none(), "residual_out"_a = nb::none(),
          "weight"_a = nb::none(), "norm"_a = nb::none(), "codes"_a = nb::none(),
          "scales"_a = nb::none(), "scale"_a = 1.0f, "eps"_a = 1e-6f, "leading_dim"_a = 0,
          "shots"_a = Shots::kAuto,
          "all_reduce of x [T, H] and the fusion's rows of helicore.ops.fused_norm_quantize in "
          "one\n"
          "kernel. Outputs are given: those that the fusion has, and no others (ValueError names\n"
          "the tensor).")
      .def("check", &DeviceCommunicator::check,
           "Raises CommError when a call of this rank has given up. Does not wait.");
}

}  // namespace

void bind_comm(nb::module_& m) {
  nb::exception<comm::CommError>(m, "CommError", PyExc_RuntimeError);
  bind_segment(m);
  bind_device_communicator(m);
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Communicator>(
      m, "Communicator",
      "One of W ranks that share memory. All ranks make the same calls in the same order, one\n"
      "thread at a time each; tensors are contiguous, on the CPU.\n\n"
      "Raises CommError naming the rank that did not come within the time limit, has died, has\n"
      "given up or made another call; after that every call does.")
      .def_static("connect", &connect, "segment"_a, "handles"_a, "timeout_s"_a = 60.0,
                  "This rank's communicator, over the memory of all ranks; `handles` in order of\n"
                  "rank. Maps memory and waits for nobody. Raises CommError naming the rank whose\n"
                  "memory can not be mapped.")
      .def_static("virtual", &make_virtual, "world_size"_a, "num_bytes"_a = size_t{64} << 20,
                  "timeout_s"_a = 60.0, "Communicators for threads of this process.")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("world_size", &Communicator::world_size)
      .def_prop_ro("timeout_s", &Communicator::timeout_s)
      .def("barrier", &Communicator::barrier, Released(), "Returns when all ranks have come.")
      .def(
          "all_reduce", &Communicator::all_reduce, "x"_a, "out"_a, Released(),
          "out = the sum of x over the ranks: in float32 in the order of ranks, rounded once, the\n"
          "same bits on every rank. float32 or bfloat16; out may be x.")
      .def(
          "all_reduce_fused",
          [](Communicator& self, quant::AllReduceFusion fusion, const TensorView& x,
             OptionalTensor residual, OptionalTensor residual_out, OptionalTensor weight,
             OptionalTensor norm, OptionalTensor codes, OptionalTensor scales, float scale,
             float eps, int64_t leading_dim) {
            all_reduce_fused(
                self, fusion, x,
                {residual, residual_out, weight, norm, codes, scales, scale, eps, leading_dim});
          },
          "fusion"_a, "x"_a, "residual"_a = nb::none(), "residual_out"_a = nb::none(),
          "weight"_a = nb::none(), "norm"_a = nb::none(), "codes"_a = nb::none(),
          "scales"_a = nb::none(), "scale"_a = 1.0f, "eps"_a = 1e-6f, "leading_dim"_a = 0,
          "all_reduce of x [T, H], rounded to its dtype, and the fusion's rows of\n"
          "helicore.ops.fused_norm_quantize in one call. Outputs are given: those that the fusion\n"
          "has, and no others (ValueError names the tensor).")
      .def("all_gather", &Communicator::all_gather, "x"_a, "out"_a, Released(),
           "out[r] = x of rank r; out is [W, *x.shape], of any dtype.")
      .def("all_to_all", &Communicator::all_to_all, "x"_a, "out"_a, Released(),
           "out[r] = x[this rank] of rank r; x and out are [W, ...], of any dtype.")
      .def("merge_partials", &Communicator::merge_partials, "o"_a, "stats"_a, "out"_a, Released(),
           "Merges partial attention over disjoint keys.\n\n"
           "o [T, H, R] float32 or bfloat16 and stats float32 [T, H, 2] (maximum in base 2, sum)\n"
           "of every rank -> out [T, H / W, R] for heads rank * H / W and on. In float32 in the\n"
           "order of ranks, rounded once. A partial of weight 0 is not read; a row that is empty\n"
           "everywhere gives 0.")
      .def("broadcast_bytes", &broadcast_bytes, "data"_a.none(), "root"_a = 0,
           "wait_forever"_a = false,
           "The bytes that `root` gives (the others give None), on every rank. wait_forever: no\n"
           "time limit for the root to come; its death is noticed all the same.")
      .def(
          "abort", [](Communicator& self, std::string_view message) { self.abort(message); },
          "message"_a,
          "Ends current and later calls of all ranks with this message. From any thread.")
      .def("close", &Communicator::close, "Lets go of the memory; later calls raise CommError.");
}

}  // namespace helicore::bindings
