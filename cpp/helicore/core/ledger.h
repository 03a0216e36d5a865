// Which rank of a context-parallel group keeps which position of a sequence; the only place where
// that is written down, for host and device code alike. docs/design/helix.md has a worked example.
//
// Positions go to the W ranks in turns of `block` rows: rank r keeps the blocks r, r + W, r + 2 W
// .. of a sequence, one after another. A super-block is W blocks, one of each rank.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HELICORE_HOST_DEVICE __host__ __device__
#else
#define HELICORE_HOST_DEVICE
#endif

namespace helicore {

struct Ledger {
  int64_t block = 1;  // rows of one turn, >= 1
  int64_t world = 1;  // ranks, >= 1

  // Positions of one super-block.
  [[nodiscard]] HELICORE_HOST_DEVICE constexpr int64_t super_block() const noexcept {
    return block * world;
  }

  // The rank that keeps `position`.
  [[nodiscard]] HELICORE_HOST_DEVICE constexpr int64_t owner(int64_t position) const noexcept {
    return position / block % world;
  }

  // Its row there: rows of a rank have no holes and grow with the position.
  [[nodiscard]] HELICORE_HOST_DEVICE constexpr int64_t slot(int64_t position) const noexcept {
    return position / super_block() * block + position % block;
  }

  // Rows that `rank` keeps of the first `length` positions.
  [[nodiscard]] HELICORE_HOST_DEVICE constexpr int64_t local_len(int64_t length,
                                                                 int64_t rank) const noexcept {
    const int64_t whole = length / super_block();
    const int64_t rest = length - whole * super_block() - rank * block;
    return whole * block + (rest < 0 ? 0 : rest > block ? block : rest);
  }

  // The position of row `slot` of `rank`.
  [[nodiscard]] HELICORE_HOST_DEVICE constexpr int64_t position(int64_t slot,
                                                                int64_t rank) const noexcept {
    return slot / block * super_block() + rank * block + slot % block;
  }

  friend constexpr bool operator==(const Ledger&, const Ledger&) = default;
};

}  // namespace helicore
