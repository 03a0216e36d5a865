// An engine that computes nothing, for caches on several levels with windows and recurrent state:
// it writes a value for every (layer, buffer, token) at both ends of the token's row and re-reads
// what it wrote. The value depends on every token before it and on the scope. Its work is a list of
// cells with addresses taken when the work is launched, so that it can run later, on a stream.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_engine.h"

namespace helicore::kv::testing {

// One row of one buffer.
struct RowCell {
  std::byte* at = nullptr;
  int64_t num_bytes = 0;  // of the row
  uint64_t value = 0;
  int32_t token = -1;  // -1: the recurrent state
  uint32_t buffer = 0;
};

// Hashes of a sequence's prefixes: [i] after i tokens.
class Lineage {
 public:
  explicit Lineage(uint64_t scope) : hashes_{mix(1, scope)} {}
  void assign(std::span<const TokenId> tokens) {
    hashes_.resize(1);
    for (TokenId token : tokens) push(token);
  }
  void push(TokenId token) { hashes_.push_back(mix(hashes_.back(), uint64_t(token) + 1)); }
  void resize(size_t num_tokens) { hashes_.resize(num_tokens + 1); }
  [[nodiscard]] uint64_t after(size_t num_tokens) const { return hashes_.at(num_tokens); }

 private:
  std::vector<uint64_t> hashes_;
};

class RowEngine {
 public:
  explicit RowEngine(const KVCacheManager& manager) : block_(manager.tokens_per_block()) {
    for (const LayerConfig& layer : manager.init_config().layers) {
      for (const BufferConfig& buffer : buffers_of(layer)) {
        const int32_t id = layer_id_of(layer);
        const BufferAttr& attr = manager.buffer_attr(id, buffer.role);
        const bool is_state = std::holds_alternative<SsmLayerConfig>(layer);
        buffers_.push_back({attr, manager.mem_pool_base_address(id, buffer.role), is_state});
      }
    }
  }

  // Rows [from, to) of one life cycle, where the page table has a page.
  void rows(const KVCache& cache, LifeCycleId life_cycle, const Lineage& lineage,
            std::pair<int32_t, int32_t> range, std::vector<RowCell>& out) const {
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const Buffer& buffer = buffers_[b];
      if (buffer.is_state || buffer.attr.life_cycle != life_cycle) continue;
      const auto table = cache.base_page_indices(life_cycle);
      const int64_t row_bytes = buffer.attr.expanded_size / block_;
      for (int32_t t = range.first; t < range.second; ++t) {
        const int32_t base = table[static_cast<size_t>(t / block_)];
        if (base == kBadPageIndex) continue;
        out.push_back({address(buffer, base) + t % block_ * row_bytes, row_bytes,
                       mix(lineage.after(static_cast<size_t>(t) + 1), b), t,
                       static_cast<uint32_t>(b)});
      }
    }
  }
  void rows(const KVCache& cache, const Lineage& lineage, std::pair<int32_t, int32_t> range,
            std::vector<RowCell>& out) const {
    std::optional<LifeCycleId> last;
    for (const Buffer& buffer : buffers_) {
      if (buffer.is_state || buffer.attr.life_cycle == last) continue;
      last = buffer.attr.life_cycle;
      bool is_first = true;
      for (const Buffer* before = buffers_.data(); before != &buffer; ++before) {
        is_first = is_first && before->attr.life_cycle != *last;
      }
      if (is_first) rows(cache, *last, lineage, range, out);
    }
  }
  // The recurrent state after `num_tokens` tokens.
  void state(const KVCache& cache, const Lineage& lineage, int32_t num_tokens,
             std::vector<RowCell>& out) const {
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (!buffers_[b].is_state) continue;
      const int32_t base = cache.ssm_base_index();
      if (base == kBadPageIndex) continue;
      out.push_back({address(buffers_[b], base), buffers_[b].attr.expanded_size,
                     mix(lineage.after(static_cast<size_t>(num_tokens)), b), -1,
                     static_cast<uint32_t>(b)});
    }
  }

  static void write(std::span<const RowCell> cells) {
    for (const RowCell& cell : cells) {
      std::memcpy(cell.at, &cell.value, sizeof(cell.value));
      std::memcpy(end_of(cell), &cell.value, sizeof(cell.value));
    }
  }
  [[nodiscard]] static std::optional<std::string> check(std::span<const RowCell> cells) {
    for (const RowCell& cell : cells) {
      if (std::memcmp(cell.at, &cell.value, sizeof(cell.value)) == 0 &&
          std::memcmp(end_of(cell), &cell.value, sizeof(cell.value)) == 0) {
        continue;
      }
      return "buffer " + std::to_string(cell.buffer) + " holds a wrong value for token " +
             std::to_string(cell.token);
    }
    return std::nullopt;
  }

 private:
  struct Buffer {
    BufferAttr attr;
    uint64_t base = 0;
    bool is_state = false;
  };
  static std::byte* end_of(const RowCell& cell) {
    return cell.at + cell.num_bytes - sizeof(cell.value);
  }
  static std::byte* address(const Buffer& buffer, int32_t base) {
    return reinterpret_cast<std::byte*>(buffer.base +
                                        static_cast<uint64_t>(base) *
                                            static_cast<uint64_t>(buffer.attr.slot_bytes()));
  }

  int32_t block_;
  std::vector<Buffer> buffers_;
};

}  // namespace helicore::kv::testing
