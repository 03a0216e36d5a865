#include "helicore/kv/block_key.h"

#include <array>
#include <bit>
#include <cstring>

namespace helicore::kv {
namespace {

constexpr char kVersion = 1;
constexpr uint8_t kKindBlock = 1;

enum Tag : char { kLora = 1, kTextSalt = 2, kNumberSalt = 3 };

template <typename Int>
void append_little_endian(std::string& out, Int value) {
  for (size_t i = 0; i < sizeof(Int); ++i) {
    out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i) & 0xff));
  }
}

void append_field(std::string& out, Tag tag, const std::string& payload) {
  out.push_back(tag);
  append_little_endian(out, static_cast<uint32_t>(payload.size()));
  out += payload;
}

}  // namespace

std::string encode_scope(const ReuseScope& scope) {
  std::string out = "HCKV";
  out.push_back(kVersion);
  if (scope.lora_id) {
    std::string payload;
    append_little_endian(payload, *scope.lora_id);
    append_little_endian(payload, scope.lora_generation);
    append_field(out, kLora, payload);
  }
  if (const auto* text = std::get_if<std::string>(&scope.salt)) {
    append_field(out, kTextSalt, *text);
  } else if (const auto* number = std::get_if<int64_t>(&scope.salt)) {
    std::string payload;
    append_little_endian(payload, *number);
    append_field(out, kNumberSalt, payload);
  }
  return out;
}

Digest root_key(const ReuseScope& scope) {
  const std::string bytes = encode_scope(scope);
  return sha256({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

Digest block_key(const Digest& parent, std::span<const TokenId> tokens) noexcept {
  static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie");
  std::array<uint8_t, 40> head{'K', 'B', kVersion, kKindBlock};
  const auto count = static_cast<uint32_t>(tokens.size());
  std::memcpy(head.data() + 4, &count, sizeof(count));
  std::memcpy(head.data() + 8, parent.data(), parent.size());
  return sha256(head, {reinterpret_cast<const uint8_t*>(tokens.data()), tokens.size_bytes()});
}

}  // namespace helicore::kv
