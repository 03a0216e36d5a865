// A radix tree over a store of its own, for any mix of life cycles, with a listener to its events.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helicore/kv/layout.h"
#include "helicore/kv/radix_tree.h"
#include "kv/event_listener.h"
#include "kv/kv_configs.h"
#include "kv/one_level_store.h"

namespace helicore::kv::testing {

inline AttentionLayerConfig full_layer(CacheDomain domain = CacheDomain::kTarget,
                                       ReusePolicy policy = ReusePolicy::kRequired) {
  return {.buffers = {{"k", 64}}, .cache_domain = domain, .reuse_policy = policy};
}
inline AttentionLayerConfig window_layer(int32_t window, int32_t sinks = 0,
                                         CacheDomain domain = CacheDomain::kTarget,
                                         ReusePolicy policy = ReusePolicy::kRequired) {
  return {.buffers = {{"k", 64}},
          .sliding_window_size = window,
          .num_sink_tokens = sinks,
          .cache_domain = domain,
          .reuse_policy = policy};
}
inline SsmLayerConfig ssm_layer() { return {.buffers = {{"s", 64}}}; }

inline KVCacheManagerConfig config_of(int32_t tokens_per_block, std::vector<LayerConfig> layers) {
  KVCacheManagerConfig config = attention_config(tokens_per_block, 1);
  for (size_t i = 0; i < layers.size(); ++i) {
    std::visit([&](auto& layer) { layer.layer_id = static_cast<int32_t>(i); }, layers[i]);
  }
  config.layers = std::move(layers);
  return config;
}

struct TreeBench {
  TreeBench(int32_t tokens_per_block, std::vector<LayerConfig> layers, int32_t num_slots = 4096,
            int lose_every = 0)
      : config(config_of(tokens_per_block, std::move(layers))),
        registry(config),
        layout(config, registry),
        owner(layout, TypedVec<PoolGroupId, int32_t>(layout.groups().count(), num_slots),
              registry.ssm_life_cycle_id()),
        store(*owner),
        events(1 << 14, tokens_per_block, registry.count()),
        tree(store, registry, tokens_per_block, &events),
        listener(lose_every),
        root(tree.find_or_create_root({})) {
    tree.pin(root);
  }

  size_t num_life_cycles() const { return registry.count(); }
  PageHandle page(size_t lc, uint8_t priority = kPriorityDefault) {
    return allocate_held(store, LifeCycleId(static_cast<int32_t>(lc)), priority);
  }
  // A block with a page for each of `lcs`, which nobody holds afterwards.
  InsertResult insert(NodeId parent, const std::vector<TokenId>& tokens,
                      std::initializer_list<size_t> lcs) {
    tree.reserve_nodes(1);
    std::vector<PageHandle> pages(num_life_cycles());
    for (size_t lc : lcs) pages[lc] = page(lc);
    const InsertResult result = tree.insert(parent, tokens, pages);
    for (size_t lc : lcs) store.unhold(pages[lc]);
    return result;
  }
  // A chain of whole blocks below the root.
  std::vector<NodeId> insert_chain(const std::vector<TokenId>& tokens,
                                   std::initializer_list<size_t> lcs) {
    std::vector<NodeId> nodes;
    const auto block = static_cast<size_t>(config.tokens_per_block);
    for (size_t at = 0; at < tokens.size(); at += block) {
      const auto own = std::span(tokens).subspan(at, std::min(block, tokens.size() - at));
      nodes.push_back(
          insert(nodes.empty() ? root : nodes.back(), {own.begin(), own.end()}, lcs).node);
    }
    return nodes;
  }
  bool attach(NodeId node, size_t lc, int32_t num_tokens) {
    const PageHandle handle = page(lc);
    const bool done = tree.attach(node, LifeCycleId(static_cast<int32_t>(lc)), handle, num_tokens);
    store.unhold(handle);
    return done;
  }
  PageId page_of(NodeId node, size_t lc) const { return tree.pages(node)[lc]; }
  int32_t coverage(NodeId node, size_t lc) const {
    return page_of(node, lc) == kNoPage ? 0 : store.page(page_of(node, lc)).num_tokens;
  }
  PrefixMatch match(const std::vector<TokenId>& tokens, const MatchRules& rules = {},
                    std::vector<NodeId>* path = nullptr) const {
    return tree.match(root, tokens, rules, path);
  }
  int32_t depth(const std::vector<TokenId>& tokens, const MatchRules& rules = {}) const {
    return match(tokens, rules).num_tokens;
  }
  std::optional<std::string> listen() {
    listener.apply(events.drain(SIZE_MAX));
    return listener.compare(tree, store);
  }
  ::testing::AssertionResult is_told() {
    const auto problem = listen();
    if (!problem) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << *problem;
  }

  KVCacheManagerConfig config;
  LifeCycleRegistry registry;
  StorageLayout layout;
  OneLevelStore owner;
  PageStore& store;
  EventLog events;
  RadixTree tree;
  EventListener listener;
  NodeId root;
};

}  // namespace helicore::kv::testing
