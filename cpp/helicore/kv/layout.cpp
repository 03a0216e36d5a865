#include "helicore/kv/layout.h"

#include <algorithm>
#include <numeric>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

// The coalesced buffers of one life cycle, largest piece first; ties go to the larger unit.
std::vector<CoalescedBuffer> coalesce(const KVCacheManagerConfig& config,
                                      const LifeCycleRegistry& registry, LifeCycleId life_cycle) {
  std::vector<CoalescedBuffer> pieces;
  for (const LayerConfig& layer : config.layers) {
    const int32_t layer_id = layer_id_of(layer);
    if (registry.of_layer(layer_id) != life_cycle) continue;
    for (const BufferConfig& buffer : buffers_of(layer)) {
      const int32_t unit = buffer.tokens_per_block_override.value_or(config.tokens_per_block);
      const int64_t size = buffer.size * (config.tokens_per_block / unit);
      auto it = std::find_if(pieces.begin(), pieces.end(),
                             [&](const auto& p) { return p.single_buffer_size == size; });
      if (it == pieces.end()) it = pieces.insert(pieces.end(), {.single_buffer_size = size});
      it->buffer_ids.push_back({layer_id, buffer.role});
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
    if (a.bytes() != b.bytes()) return a.bytes() > b.bytes();
    return a.single_buffer_size > b.single_buffer_size;
  });
  return pieces;
}

std::vector<int64_t> sizes_of(const std::vector<CoalescedBuffer>& pieces) {
  std::vector<int64_t> sizes;
  for (const CoalescedBuffer& piece : pieces) sizes.push_back(piece.bytes());
  return sizes;
}

}  // namespace

int64_t PoolGroupLayout::slot_bytes() const noexcept {
  return std::accumulate(piece_bytes.begin(), piece_bytes.end(), int64_t{0});
}

StorageLayout::StorageLayout(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry)
    : group_of_(registry.count()), tokens_per_block_(config.tokens_per_block) {
  std::map<std::pair<CacheDomain, std::vector<int64_t>>, std::vector<SlotDescVariant>> by_key;
  for (size_t i = 0; i < registry.count(); ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    auto pieces = coalesce(config, registry, id);
    auto sizes = sizes_of(pieces);
    by_key[{registry[id].domain, std::move(sizes)}].push_back({id, std::move(pieces)});
  }
  for (auto& [key, variants] : by_key) {
    const PoolGroupId group(static_cast<int32_t>(groups_.count()));
    for (const SlotDescVariant& variant : variants) group_of_[variant.life_cycle] = group;
    groups_.push_back({key.first, key.second, std::move(variants)});
  }
  for (size_t g = 0; g < groups_.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    for (const SlotDescVariant& variant : groups_[group].variants) {
      for (size_t p = 0; p < variant.coalesced_buffers.size(); ++p) {
        const CoalescedBuffer& piece = variant.coalesced_buffers[p];
        for (size_t i = 0; i < piece.buffer_ids.size(); ++i) {
          const BufferId& id = piece.buffer_ids[i];
          const auto is_same_layer = [&](const BufferId& other) {
            return other.layer_id == id.layer_id;
          };
          const auto same_layer =
              std::count_if(piece.buffer_ids.begin(), piece.buffer_ids.end(), is_same_layer);
          const auto before = std::count_if(
              piece.buffer_ids.begin(), piece.buffer_ids.begin() + static_cast<std::ptrdiff_t>(i),
              is_same_layer);
          buffers_[id] = {.life_cycle = variant.life_cycle,
                          .group = group,
                          .pool = PoolIndex(static_cast<int32_t>(p)),
                          .offset = static_cast<int64_t>(i) * piece.single_buffer_size,
                          .expanded_size = piece.single_buffer_size,
                          .expansion = 1,
                          .scale = static_cast<int32_t>(piece.buffer_ids.size()),
                          .layer_slot_util = static_cast<int32_t>(same_layer),
                          .layer_slot_index = static_cast<int32_t>(before)};
        }
      }
    }
  }
  for (const LayerConfig& layer : config.layers) {
    for (const BufferConfig& buffer : buffers_of(layer)) {
      const int32_t unit = buffer.tokens_per_block_override.value_or(config.tokens_per_block);
      buffers_.at({layer_id_of(layer), buffer.role}).expansion = config.tokens_per_block / unit;
    }
  }
}

const BufferAttr& StorageLayout::buffer(int32_t layer_id, const std::string& role) const {
  const auto it = buffers_.find({layer_id, role});
  HELICORE_CHECK(it != buffers_.end(), "kv.layout",
                 "layer_id and role must name a buffer of the config, got layer ", layer_id,
                 ", role '", role, "'");
  return it->second;
}

void PageIndexConverter::convert(std::span<const int32_t> base, std::span<int32_t> out,
                                 PageIndexMode mode) const {
  HELICORE_CHECK(out.size() == base.size() * static_cast<size_t>(expansion),
                 "kv.PageIndexConverter", "out must hold base.size() * expansion = ",
                 base.size() * static_cast<size_t>(expansion), " entries, got ", out.size());
  const int32_t offset = mode == PageIndexMode::kPerLayer ? layer_offset : 0;
  size_t at = 0;
  for (int32_t slot : base) {
    const int32_t page = slot == kBadPageIndex ? 0 : (slot * scale + offset) * expansion;
    for (int32_t k = 0; k < expansion; ++k) {
      out[at++] = slot == kBadPageIndex ? kBadPageIndex : page + k;
    }
  }
}

void PageIndexConverter::convert(std::span<const int32_t> base, std::span<int32_t> out,
                                 PageIndexMode mode, const ScratchDesc& scratch) const {
  constexpr const char* kWhere = "kv.PageIndexConverter";
  HELICORE_CHECK(mode == PageIndexMode::kPerLayer, kWhere,
                 "index_mode must be PER_LAYER with scratch blocks, got SHARED");
  HELICORE_CHECK(scratch.range.begin >= 0 && scratch.range.begin <= scratch.range.end, kWhere,
                 "scratch.range must be in order and >= 0, got [", scratch.range.begin, ", ",
                 scratch.range.end, ")");
  const int64_t num_blocks = scratch.range.end - scratch.range.begin;
  const int64_t needed = (num_blocks * scratch_pages_per_block + scale - 1) / scale;
  HELICORE_CHECK(static_cast<int64_t>(scratch.slot_ids.size()) >= needed, kWhere,
                 "scratch.slot_ids must have ", needed, " entries for ", num_blocks,
                 " blocks, got ", scratch.slot_ids.size());
  convert(base, out, mode);
  const auto end = std::min<int64_t>(scratch.range.end, static_cast<int64_t>(base.size()));
  for (int64_t o = scratch.range.begin; o < end; ++o) {
    const int64_t t = (o - scratch.range.begin) * scratch_pages_per_block + scratch_page;
    const int32_t slot = scratch.slot_ids[static_cast<size_t>(t / scale)];
    const int64_t place = (t % scale + layer_offset - scratch_page) % scale;
    const auto page = static_cast<int32_t>((int64_t{slot} * scale + place) * expansion);
    for (int32_t k = 0; k < expansion; ++k) {
      out[static_cast<size_t>(o * expansion + k)] = page + k;
    }
  }
}

}  // namespace helicore::kv
