// Pieces of moe that work on memory handed in; used by the public entries of this area only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helicore/core/tensor_view.h"
#include "helicore/moe/router.h"

namespace helicore::moe {

// Carves 64-byte aligned arrays out of one block; with a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  [[nodiscard]] size_t used() const noexcept { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

struct RouteArgs {
  const TensorView* x;
  const TensorView* gate;
  const TensorView* bias;  // or null
  const RouterConfig* config;
  int32_t* ids;    // [T, k]
  float* weights;  // [T, k]
};

// route() after its checks; logits is scratch [T, E].
void route_with(const RouteArgs& args, float* logits);
// The checks of x, gate, bias and config.
void check_route(const TensorView& x, const TensorView& gate, const TensorView* bias,
                 const RouterConfig& config, const char* where);

}  // namespace helicore::moe
