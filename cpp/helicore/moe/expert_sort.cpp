#include "helicore/moe/expert_sort.h"

#include <cstring>

namespace helicore::moe {

void sort_by_expert(const int32_t* ids, int64_t tokens, int32_t top_k, int32_t num_experts,
                    ExpertSort* sort) {
  const int64_t rows = tokens * top_k;
  int32_t* offsets = sort->offsets;
  std::memset(offsets, 0, sizeof(int32_t) * static_cast<size_t>(num_experts + 1));
  for (int64_t i = 0; i < rows; ++i) {
    if (ids[i] >= 0) ++offsets[ids[i] + 1];
  }
  sort->num_active = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (offsets[e + 1] != 0) sort->active[sort->num_active++] = e;
    offsets[e + 1] += offsets[e];
  }
  // Filling advances each start to its end; the starts are then the ends of the expert before.
  for (int64_t i = 0; i < rows; ++i) {
    if (ids[i] < 0) {
      sort->position[i] = -1;
      continue;
    }
    const int32_t row = offsets[ids[i]]++;
    sort->position[i] = row;
    sort->row_token[row] = static_cast<int32_t>(i / top_k);
  }
  for (int32_t e = num_experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

}  // namespace helicore::moe
