// CUDA error checks; included by CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

namespace helicore::cuda {

// Throws CudaError naming `call` unless `code` is cudaSuccess.
void check(cudaError_t code, const char* call);

// After every kernel launch: throws CudaError naming `kernel` when the launch was refused.
void check_launch(const char* kernel);

}  // namespace helicore::cuda
