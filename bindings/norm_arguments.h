// The tensors of a call with a fused norm, as Python passes them.
#pragma once

#include <optional>

#include "casters.h"
#include "helicore/quant/norm_epilogue.h"

namespace helicore::bindings {

using OptionalTensor = const std::optional<TensorView>&;

struct NormArguments {
  const std::optional<TensorView>& residual;
  const std::optional<TensorView>& residual_out;
  const std::optional<TensorView>& weight;
  const std::optional<TensorView>& norm;
  const std::optional<TensorView>& codes;
  const std::optional<TensorView>& scales;
  float scale;
  float eps;
  int64_t leading_dim;

  [[nodiscard]] quant::NormEpilogueTensors tensors() const {
    const auto pointer = [](const std::optional<TensorView>& t) { return t ? &*t : nullptr; };
    return {.residual = pointer(residual),
            .residual_out = pointer(residual_out),
            .weight = pointer(weight),
            .norm = pointer(norm),
            .codes = pointer(codes),
            .scales = pointer(scales),
            .scale = scale,
            .eps = eps,
            .leading_dim = leading_dim};
  }
};

}  // namespace helicore::bindings
