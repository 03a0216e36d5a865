// A prefill engine that computes nothing: it goes through the layers of a step one after the other,
// as a model does, writes a recognisable value for every row of the step where the page index
// converters say, and reads back what each query of the layer attends to before it goes on to the
// next layer.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_engine.h"

namespace helicore::kv::testing {

class LayerwiseEngine {
 public:
  explicit LayerwiseEngine(const KVCacheManager& manager) : manager_(manager) {
    for (const LayerConfig& layer : manager.init_config().layers) {
      if (const auto* attention = std::get_if<AttentionLayerConfig>(&layer)) {
        layers_.push_back(*attention);
      }
    }
  }

  // Faults of a broken engine, for negative controls.
  bool drops_last_slot = false;       // one slot too few: the last one's pages go to the first slot
  bool forgets_scratch_page = false;  // all buffers of a layer begin at the same page

  // Runs the step [history, capacity) of `tokens`, the whole sequence; the first wrong value that
  // a query reads, in words.
  [[nodiscard]] std::optional<std::string> run(const KVCache& cache,
                                               std::span<const TokenId> tokens) const {
    for (const AttentionLayerConfig& layer : layers_) {
      std::vector<Buffer> buffers;
      for (const BufferConfig& buffer : layer.buffers) {
        buffers.push_back(buffer_of(cache, layer, buffer));
      }
      for (int32_t i = cache.history_length(); i < cache.capacity(); ++i) {
        for (const Buffer& buffer : buffers) {
          const uint64_t value = value_of(layer, buffer, tokens, i);
          std::memcpy(row(cache, buffer, i), &value, sizeof(value));
        }
      }
      if (auto wrong = read(cache, layer, buffers, tokens)) return wrong;
    }
    return std::nullopt;
  }

 private:
  struct Buffer {
    std::string role;
    uint64_t base = 0;
    int64_t stride = 0;
    int32_t expansion = 1;
    std::vector<int32_t> pages;
  };

  [[nodiscard]] Buffer buffer_of(const KVCache& cache, const AttentionLayerConfig& layer,
                                 const BufferConfig& config) const {
    const int32_t id = layer.layer_id;
    Buffer buffer{config.role,
                  manager_.mem_pool_base_address(id, config.role, PageIndexMode::kPerLayer),
                  manager_.page_stride(id, config.role),
                  1,
                  {}};
    PageIndexConverter converter = manager_.page_index_converter(id, config.role);
    if (forgets_scratch_page) converter.scratch_page = 0;
    const LifeCycleId group = manager_.layer_group_id(id);
    const auto base = cache.base_page_indices(group);
    buffer.expansion = converter.expansion;
    buffer.pages.resize(base.size() * static_cast<size_t>(converter.expansion));
    auto scratch = cache.scratch().desc(group);
    if (scratch && drops_last_slot) scratch->slot_ids.back() = scratch->slot_ids.front();
    if (scratch) {
      converter.convert(base, buffer.pages, PageIndexMode::kPerLayer, *scratch);
    } else {
      converter.convert(base, buffer.pages, PageIndexMode::kPerLayer);
    }
    return buffer;
  }

  [[nodiscard]] std::optional<std::string> read(const KVCache& cache,
                                                const AttentionLayerConfig& layer,
                                                const std::vector<Buffer>& buffers,
                                                std::span<const TokenId> tokens) const {
    const int32_t history = cache.history_length();
    const int32_t window = layer.sliding_window_size.value_or(cache.capacity());
    const int32_t sinks = layer.num_sink_tokens.value_or(0);
    const int32_t first = std::max(0, history + 1 - window);  // of the first query
    for (int32_t i = 0; i < cache.capacity(); ++i) {
      if (i < first && i >= sinks) continue;
      for (const Buffer& buffer : buffers) {
        uint64_t value = 0;
        const std::byte* at = row(cache, buffer, i);
        if (at != nullptr) std::memcpy(&value, at, sizeof(value));
        if (at != nullptr && value == value_of(layer, buffer, tokens, i)) continue;
        std::ostringstream out;
        out << "cache " << cache.id() << ", step [" << history << ", " << cache.capacity()
            << "): layer " << layer.layer_id << " role '" << buffer.role << "' "
            << (at == nullptr ? "has no page" : "holds a wrong value") << " for token " << i;
        return out.str();
      }
    }
    return std::nullopt;
  }

  static uint64_t value_of(const AttentionLayerConfig& layer, const Buffer& buffer,
                           std::span<const TokenId> tokens, int32_t index) {
    uint64_t value = mix(static_cast<uint64_t>(layer.layer_id), static_cast<uint64_t>(index));
    for (char c : buffer.role) value = mix(value, static_cast<uint8_t>(c));
    return mix(value, static_cast<uint64_t>(tokens[static_cast<size_t>(index)]));
  }

  static std::byte* row(const KVCache& cache, const Buffer& buffer, int32_t token) {
    const int32_t per_page = cache.tokens_per_block() / buffer.expansion;
    const int32_t page = buffer.pages[static_cast<size_t>(token / per_page)];
    if (page < 0) return nullptr;
    const int64_t row_bytes = buffer.stride / per_page;
    return reinterpret_cast<std::byte*>(buffer.base) + page * buffer.stride +
           token % per_page * row_bytes;
  }

  const KVCacheManager& manager_;
  std::vector<AttentionLayerConfig> layers_;
};

}  // namespace helicore::kv::testing
