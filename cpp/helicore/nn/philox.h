// Philox4x32-10: a counter-based random number generator (Salmon, Moraes, Dror and Shaw, SC 2011).
//
// The number drawn for (seed, position) is a pure function of the two: a seeded request draws the
// same numbers in any batch, on any thread, after any preemption.
#pragma once

#include <array>
#include <cstdint>

namespace helicore::nn {

using PhiloxBlock = std::array<uint32_t, 4>;

// Ten rounds over `counter` under `key`.
[[nodiscard]] constexpr PhiloxBlock philox(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// A uniform double in [0, 1) with 53 random bits for (seed, position).
[[nodiscard]] constexpr double philox_uniform(uint64_t seed, uint64_t position) {
  const PhiloxBlock r =
      philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
             {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{r[0]} << 32 | r[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace helicore::nn
