// The frames of an operation log: how its bytes are cut and checked. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "helicore/kv/operation_log.h"

namespace helicore::kv::frames {

enum class FrameType : uint8_t {
  kHeader = 0,
  kOperation = 1,  // arguments and results
  kBegun = 2,      // arguments
  kFinished = 3,   // the operation that began last, with its results
  kEnd = 4,        // text: why the recording ended early, or nothing
};

inline constexpr std::string_view kMagic = "hckvops\n";
inline constexpr size_t kPreludeBytes = kMagic.size() + sizeof(uint32_t);
inline constexpr size_t kFrameHeadBytes = 2 * sizeof(uint32_t);

void put_prelude(std::vector<std::byte>& out);
void put_frame(FrameType type, std::span<const std::byte> body, std::vector<std::byte>& out);
void put_frame(FrameType type, std::string_view text, std::vector<std::byte>& out);
void put_frame(FrameType type, const Operation& operation, std::vector<std::byte>& out);

enum class FrameState : uint8_t { kSound, kNone, kTorn, kDamaged };
struct Frame {
  FrameState state = FrameState::kNone;
  FrameType type{};
  std::span<const std::byte> body{};
};
// Takes the next frame off the front of `bytes`. A frame that reaches to the end of the bytes or
// beyond and does not check is torn, one with bytes behind it is damaged.
[[nodiscard]] Frame take_frame(std::span<const std::byte>& bytes);

// The header's text.
[[nodiscard]] std::string header_text(const OperationLog& log);
void parse_header(std::string_view text, OperationLog& log);

}  // namespace helicore::kv::frames
