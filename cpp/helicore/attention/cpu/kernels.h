// CPU kernels of latent attention, one variant per instruction set. Called by mla.cpp, which checks
// the arguments and owns the parallel loops; a function here does one task on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helicore/attention/mla_params.h"
#include "helicore/attention/planner.h"
#include "helicore/core/cpu/isa.h"

namespace helicore::attention {

// Partials of a decode plan: slot s has m[tile_rows], l[tile_rows], o[tile_rows][ldo] float32 at s
// * slot_stride.
struct DecodeScratch {
  void* worker = nullptr;     // this worker's decode_worker_bytes()
  float* partials = nullptr;  // num_slots * slot_stride floats, shared
  int64_t slot_stride = 0;
  int32_t tile_rows = 0;
};

// Query rows [q_begin, q_end) of one head of one request. The scratch holds keys and values of
// chunk_tokens tokens.
struct PrefillTask {
  int32_t request = 0;
  int32_t head = 0;
  int32_t q_begin = 0;
  int32_t q_end = 0;
  int64_t cost = 0;
};

inline constexpr int64_t kDecodeStripColumns = 32;  // o is padded to strips in scratch
inline constexpr int32_t kPrefillTileRows = 32;     // query rows of a tile

HELICORE_DECLARE_ISA(
    void mla_append_rows(const MlaAppendParams& params, int64_t begin, int64_t end);
    void rope_rows(const RopeRowsParams& params, int64_t begin, int64_t end);
    void mla_decode_task(const MlaDecodeParams& params, const DecodeTask& task,
                         const DecodeScratch& scratch);
    void mla_decode_merge(const MlaDecodeParams& params, const DecodeMerge& merge,
                          const DecodeScratch& scratch, int32_t row_begin, int32_t row_end);
    void mla_prefill_task(const MlaPrefillParams& params, const PrefillTask& task,
                          int64_t chunk_tokens, void* scratch);
    void merge_state_rows(const MergeStatesParams& params, int64_t begin, int64_t end);)

}  // namespace helicore::attention
