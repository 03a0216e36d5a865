// The checks of the CUDA entry; compiled with and without CUDA.
#include "helicore/quant/cuda/norm_quantize.h"

#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"

namespace helicore::quant::cuda {
namespace {

constexpr int64_t kPacketBytes = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

}  // namespace

EpilogueParams make_params(const NormEpilogue& epilogue, int64_t rows) {
  EpilogueParams p;
  p.residual = epilogue.residual;
  p.residual_out = epilogue.residual_out;
  p.weight = epilogue.weight;
  p.norm = epilogue.norm;
  p.width = static_cast<int32_t>(epilogue.width);
  p.num_rows = rows;
  p.eps = epilogue.eps;
  const int64_t packet = kPacketBytes / static_cast<int64_t>(size_of(epilogue.dtype));
  p.is_whole = epilogue.width % packet == 0;
  for (const void* tensor : {p.residual, static_cast<const void*>(p.residual_out), p.weight,
                             static_cast<const void*>(p.norm)}) {
    p.is_whole &= is_aligned(tensor, kPacketBytes);
  }
  if (!epilogue.quantizer) return p;
  const RowQuantizer& q = *epilogue.quantizer;
  p.has_codes = true;
  p.codes = q.codes;
  p.codes_stride = q.codes_stride;
  p.scales = q.scales;
  p.scale = q.coding.scale;
  p.format = q.coding.format;
  p.layout = q.coding.layout;
  const int64_t group = group_size(q.coding.format, q.width);
  p.num_groups = static_cast<int32_t>(ceil_div(q.width, group));
  p.scale_ld = q.scale_shape.strides[1];
  p.has_byte_scales = q.scale_shape.dtype != DType::kFloat32;
  p.num_scales = q.scale_shape.num_elements;
  if (q.coding.format == RowFormat::kFp8GroupPacked) p.num_scales *= 4;
  p.has_padding = q.scales != nullptr && p.num_scales != rows * p.num_groups;
  p.is_whole &= is_aligned(q.codes, packet) && q.codes_stride % packet == 0;
  return p;
}

RowShape row_shape(const EpilogueParams& p, DType dtype, int64_t rows, int max_blocks) noexcept {
  const int64_t packets = ceil_div(p.width * static_cast<int64_t>(size_of(dtype)), kPacketBytes);
  RowShape shape{.packets = 8};
  if (p.is_whole && packets <= 1024) {
    shape.packets = 1;
  } else if (p.is_whole && packets <= 2048) {
    shape.packets = 2;
  }
  // Groups of up to 32 packets share a scale: a block holds whole warps of them.
  while (shape.packets == 1 && shape.cluster < 8 && packets > 64 * int64_t{shape.cluster} &&
         rows * shape.cluster * 2 <= max_blocks) {
    shape.cluster *= 2;
  }
  shape.threads =
      static_cast<int>(ceil_div(packets, 32 * int64_t{shape.packets * shape.cluster}) * 32);
  return shape;
}

void check_rows(const TensorView& x, const char* where) {
  HELICORE_CHECK(x.device.type == DeviceType::kCuda, where, "x must be on a GPU, got ",
                 x.describe());
  HELICORE_CHECK(x.ndim == 2 && x.size(1) * static_cast<int64_t>(size_of(x.dtype)) <= kMaxRowBytes,
                 where, "x must be [T, H] with rows of at most ", kMaxRowBytes, " bytes, got ",
                 x.describe());
}

void norm_quantize(AllReduceFusion fusion, const TensorView& x, const NormEpilogueTensors& tensors,
                   Stream stream) {
  constexpr const char* kWhere = "quant.norm_quantize";
  check_rows(x, kWhere);
  const NormEpilogue epilogue = make_epilogue(fusion, x, tensors, kWhere);
  if (epilogue.weight == nullptr || x.size(0) == 0 || x.size(1) == 0) return;
  EpilogueParams params = make_params(epilogue, x.size(0));
  params.is_whole &= is_aligned(x.data, kPacketBytes);
  const int num_sms = helicore::cuda::num_multiprocessors(x.device.index);
  launch_norm_quantize(params, x.data, x.dtype,
                       row_shape(params, x.dtype, params.num_rows, num_sms), stream);
}

}  // namespace helicore::quant::cuda
