#include "helicore/kv/layout.h"

#include <gtest/gtest.h>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

KVCacheManagerConfig config_with(std::vector<LayerConfig> layers) {
  auto config = attention_config(8, 8);
  config.layers = std::move(layers);
  return config;
}

StorageLayout layout_of(const KVCacheManagerConfig& config) {
  return StorageLayout(config, LifeCycleRegistry(config));
}

TEST(Layout, equal_buffers_of_a_life_cycle_lie_back_to_back_in_declaration_order) {
  const auto layout = layout_of(config_with({AttentionLayerConfig{0, {{"k", 64}, {"v", 64}}},
                                             AttentionLayerConfig{1, {{"k", 64}, {"scale", 8}}}}));
  ASSERT_EQ(layout.groups().count(), 1u);
  const PoolGroupLayout& group = layout.groups()[PoolGroupId(0)];
  EXPECT_EQ(group.piece_bytes, (std::vector<int64_t>{192, 8}));
  EXPECT_EQ(group.slot_bytes(), 200);
  EXPECT_EQ(layout.buffer(0, "k").offset, 0);
  EXPECT_EQ(layout.buffer(0, "v").offset, 64);
  EXPECT_EQ(layout.buffer(1, "k").offset, 128);
  EXPECT_EQ(layout.buffer(1, "k").scale, 3);
  EXPECT_EQ(layout.buffer(0, "k").layer_slot_util, 2);
  EXPECT_EQ(layout.buffer(1, "scale").pool, PoolIndex(1));
  EXPECT_EQ(layout.buffer(1, "scale").scale, 1);
}

TEST(Layout, domains_never_share_a_pool_group_even_with_equal_sizes) {
  const auto config =
      config_with({AttentionLayerConfig{0, {{"k", 64}}, {}, {}, CacheDomain::kDraft},
                   AttentionLayerConfig{1, {{"k", 64}}}});
  const LifeCycleRegistry registry(config);
  const StorageLayout layout(config, registry);
  ASSERT_EQ(layout.groups().count(), 2u);
  EXPECT_EQ(layout.groups()[PoolGroupId(0)].domain, CacheDomain::kTarget) << "target comes first";
  EXPECT_NE(layout.group_of(registry.of_layer(0)), layout.group_of(registry.of_layer(1)));
}

TEST(Layout, life_cycles_of_one_domain_with_equal_sizes_share_a_group) {
  const auto config =
      config_with({AttentionLayerConfig{0, {{"k", 64}}}, AttentionLayerConfig{1, {{"k", 64}}, 16},
                   AttentionLayerConfig{2, {{"k", 32}}, 32}});
  const LifeCycleRegistry registry(config);
  const StorageLayout layout(config, registry);
  ASSERT_EQ(layout.groups().count(), 2u);
  EXPECT_EQ(layout.groups()[PoolGroupId(0)].slot_bytes(), 32) << "ascending by size list";
  EXPECT_EQ(layout.groups()[PoolGroupId(1)].variants.size(), 2u);
}

TEST(Layout, a_manager_of_draft_layers_alone_is_fine) {
  const auto layout =
      layout_of(config_with({AttentionLayerConfig{0, {{"k", 64}}, {}, {}, CacheDomain::kDraft}}));
  EXPECT_EQ(layout.groups()[PoolGroupId(0)].domain, CacheDomain::kDraft);
}

TEST(Layout, an_override_makes_several_kernel_pages_of_one_block) {
  const auto layout = layout_of(
      config_with({AttentionLayerConfig{0, {{"k", 16, 2}}}, AttentionLayerConfig{1, {{"k", 64}}}}));
  const BufferAttr& buffer = layout.buffer(0, "k");
  EXPECT_EQ(buffer.expansion, 4);
  EXPECT_EQ(buffer.expanded_size, 64);
  EXPECT_EQ(buffer.page_stride(), 16);
  EXPECT_EQ(buffer.scale, 2) << "coalesced by expanded size";
  EXPECT_EQ(layout.buffer(1, "k").expansion, 1);
  EXPECT_EQ(buffer.page_index_upper_bound(10), (2 * 10 - 0) * 4);
  EXPECT_EQ(layout.buffer(1, "k").page_index_upper_bound(10), 2 * 10 - 1);
}

TEST(Layout, converted_indices_address_the_same_bytes_in_both_modes) {
  const auto layout = layout_of(config_with(
      {AttentionLayerConfig{0, {{"k", 16, 2}, {"v", 64}}}, AttentionLayerConfig{1, {{"k", 64}}}}));
  const std::vector<int32_t> slots{3, kBadPageIndex, 0};
  for (const auto& [id, buffer] : layout.buffers()) {
    const PageIndexConverter converter{buffer.scale, buffer.expansion, buffer.layer_offset()};
    std::vector<int32_t> shared(3 * static_cast<size_t>(buffer.expansion));
    std::vector<int32_t> per_layer(shared.size());
    converter.convert(slots, shared, PageIndexMode::kShared);
    converter.convert(slots, per_layer, PageIndexMode::kPerLayer);
    for (size_t i = 0; i < shared.size(); ++i) {
      const auto k = static_cast<int64_t>(i) % buffer.expansion;
      const int32_t slot = slots[i / static_cast<size_t>(buffer.expansion)];
      if (slot == kBadPageIndex) {
        EXPECT_EQ(shared[i], kBadPageIndex);
        EXPECT_EQ(per_layer[i], kBadPageIndex);
        continue;
      }
      const int64_t expected =
          slot * buffer.slot_bytes() + buffer.offset + k * buffer.page_stride();
      EXPECT_EQ(buffer.offset + shared[i] * buffer.page_stride(), expected) << id.role;
      EXPECT_EQ(per_layer[i] * buffer.page_stride(), expected) << id.role;
    }
  }
}

TEST(Layout, an_output_of_the_wrong_length_is_refused) {
  const std::vector<int32_t> slots{1};
  std::vector<int32_t> out(1);
  EXPECT_THROW((PageIndexConverter{1, 2, 0}.convert(slots, out, PageIndexMode::kShared)),
               InvalidArgument);
}

TEST(Layout, unknown_buffers_are_refused) {
  const auto layout = layout_of(attention_config(4, 8));
  EXPECT_THROW((void)layout.buffer(0, "nope"), InvalidArgument);
  EXPECT_THROW((void)layout.buffer(9, "latent"), InvalidArgument);
}

}  // namespace
}  // namespace helicore::kv::testing
