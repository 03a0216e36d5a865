// An engine that computes nothing: it writes a recognisable value for every (layer, buffer, token)
// into real pool memory through the page tables, and re-reads the whole committed history. The
// value depends on every token before it and on the scope, so that a page of another prefix, scope
// or position can't pass.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "helicore/kv/block_key.h"
#include "helicore/kv/kv_cache_manager.h"

namespace helicore::kv::testing {

inline uint64_t mix(uint64_t h, uint64_t value) {
  h ^= value + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdu;
  return h ^ h >> 33;
}

class FakeEngine {
 public:
  explicit FakeEngine(const KVCacheManager& manager) : manager_(manager) {
    for (const LayerConfig& layer : manager.init_config().layers) {
      for (const BufferConfig& buffer : buffers_of(layer)) {
        buffers_.push_back({layer_id_of(layer), buffer.role});
      }
    }
  }

  // Writes the rows of tokens [from, tokens.size()); `tokens` is the whole sequence.
  void write(const KVCache& cache, std::span<const TokenId> tokens, size_t from) const {
    uint64_t state = scope_state(cache);
    for (size_t i = 0; i < tokens.size(); ++i) {
      state = mix(state, static_cast<uint64_t>(tokens[i]));
      if (i < from) continue;
      for (size_t b = 0; b < buffers_.size(); ++b) {
        const uint64_t value = mix(state, b);
        std::memcpy(row(cache, b, i), &value, sizeof(value));
      }
    }
  }

  // Re-reads [0, tokens.size()); the first wrong value, in words.
  [[nodiscard]] std::optional<std::string> check(const KVCache& cache,
                                                 std::span<const TokenId> tokens) const {
    uint64_t state = scope_state(cache);
    for (size_t i = 0; i < tokens.size(); ++i) {
      state = mix(state, static_cast<uint64_t>(tokens[i]));
      for (size_t b = 0; b < buffers_.size(); ++b) {
        uint64_t value = 0;
        std::memcpy(&value, row(cache, b, i), sizeof(value));
        if (value == mix(state, b)) continue;
        std::ostringstream out;
        out << "cache " << cache.id() << ": layer " << buffers_[b].layer_id << " role '"
            << buffers_[b].role << "' holds a wrong value for token " << i;
        return out.str();
      }
    }
    return std::nullopt;
  }

  // Fills blocks [from, num_blocks) with a pattern, as a previous owner of the slots might have
  // left them.
  void poison(const KVCache& cache, int32_t from) const {
    const auto block = static_cast<size_t>(cache.tokens_per_block());
    for (auto i = static_cast<size_t>(from) * block;
         i < static_cast<size_t>(cache.num_blocks()) * block; ++i) {
      for (size_t b = 0; b < buffers_.size(); ++b) std::memset(row(cache, b, i), 0xff, 8);
    }
  }

  // Where the first 8 bytes of a token's row lie.
  [[nodiscard]] std::byte* row(const KVCache& cache, size_t buffer, size_t token) const {
    const BufferId& id = buffers_[buffer];
    const BufferAttr& attr = manager_.buffer_attr(id.layer_id, id.role);
    const auto block = static_cast<size_t>(cache.tokens_per_block());
    const int32_t base = cache.base_page_indices(attr.life_cycle)[token / block];
    const size_t tokens_per_page = block / static_cast<size_t>(attr.expansion);
    const int64_t page = int64_t{base} * attr.scale * attr.expansion +
                         static_cast<int64_t>(token % block / tokens_per_page);
    const int64_t row_bytes = attr.page_stride() / static_cast<int64_t>(tokens_per_page);
    const auto address = manager_.mem_pool_base_address(id.layer_id, id.role) +
                         static_cast<uint64_t>(page * attr.page_stride()) +
                         (token % tokens_per_page) * static_cast<uint64_t>(row_bytes);
    return reinterpret_cast<std::byte*>(address);
  }

 private:
  static uint64_t scope_state(const KVCache& cache) {
    uint64_t state = 1;
    for (char c : encode_scope(cache.reuse_scope())) state = mix(state, static_cast<uint8_t>(c));
    return state;
  }

  const KVCacheManager& manager_;
  std::vector<BufferId> buffers_;
};

}  // namespace helicore::kv::testing
