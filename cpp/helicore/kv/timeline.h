// Points in time that memory waits for: "the copy is done", "step 7 no longer reads this". A
// timeline is a counter that only grows; a point is reached when its timeline's counter is at least
// the point's value. Asking costs one load and one compare, whoever moves the counter: a GPU
// stream, an I/O thread or the caller's step loop.
#pragma once

#include <cstdint>

namespace helicore::kv {

// Packed into 8 bytes: 16 bits of timeline, 48 bits of value. The default point is always reached.
class TimePoint {
 public:
  static constexpr uint32_t kMaxTimelines = 1u << 16;
  static constexpr uint64_t kMaxValue = (uint64_t{1} << 48) - 1;

  constexpr TimePoint() noexcept = default;
  constexpr TimePoint(uint32_t timeline, uint64_t value) noexcept
      : bits_(uint64_t{timeline} << 48 | value) {}

  [[nodiscard]] constexpr uint32_t timeline() const noexcept {
    return static_cast<uint32_t>(bits_ >> 48);
  }
  [[nodiscard]] constexpr uint64_t value() const noexcept { return bits_ & kMaxValue; }
  // True for the default point, which needs no waiting.
  [[nodiscard]] constexpr bool is_none() const noexcept { return value() == 0; }
  friend constexpr bool operator==(const TimePoint&, const TimePoint&) = default;

 private:
  uint64_t bits_ = 0;
};
static_assert(sizeof(TimePoint) == 8);

}  // namespace helicore::kv
