// Two sequences that share a prefix, their pages in a KV cache manager, and one decode step of
// latent attention through the page tables. No Python, no torch.
//
// Prints what the manager found in its cache, and checks the attention against a plain loop.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "helicore/helicore.h"
#include "latent_rows.h"

namespace {

using example::kLatentDim;
using example::kNumHeads;
using example::kNumLayers;
using example::kRowDim;

constexpr int32_t kTokensPerBlock = 16;
constexpr int32_t kMaxBlocks = 16;  // of one sequence
const std::string kRole = "latent";

helicore::kv::KVCacheManagerConfig manager_config() {
  helicore::kv::KVCacheManagerConfig config;
  config.tokens_per_block = kTokensPerBlock;
  config.cache_tiers = {helicore::kv::HostCacheTierConfig{.quota = 8 << 20}};
  for (int32_t layer = 0; layer < kNumLayers; ++layer) {
    helicore::kv::AttentionLayerConfig attention;
    attention.layer_id = layer;
    attention.buffers = {{.role = kRole,
                          .size = kTokensPerBlock * kRowDim * int64_t{sizeof(float)},
                          .tokens_per_block_override = {}}};
    config.layers.push_back(attention);
  }
  return config;
}

// The pages of one layer as attention sees them: [num_pages, kTokensPerBlock, kRowDim], where page
// i is slot i of the manager's page tables.
helicore::TensorView layer_cache(const helicore::kv::KVCacheManager& manager, int32_t layer) {
  const auto& buffer = manager.buffer_attr(layer, kRole);
  const auto groups = manager.pool_group_descs();
  const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& candidate) {
    return candidate.pool_group == buffer.group;
  });
  helicore::TensorView view =
      helicore::make_view(reinterpret_cast<void*>(manager.mem_pool_base_address(layer, kRole)),
                          helicore::DType::kFloat32, {group->num_slots, kTokensPerBlock, kRowDim});
  view.strides[0] = buffer.slot_bytes() / int64_t{sizeof(float)};
  return view;
}

// One sequence: its tokens and its pages.
struct Sequence {
  std::vector<int32_t> tokens;
  std::unique_ptr<helicore::kv::KVCache> cache;
};

// Takes what the cache has of the tokens, writes the rows of the rest and makes them reusable.
// Returns false when there is no room.
bool prefill(helicore::kv::KVCacheManager& manager, Sequence& sequence) {
  const auto length = static_cast<int32_t>(sequence.tokens.size());
  helicore::kv::CreateOptions options;
  options.input_tokens = sequence.tokens;
  sequence.cache = manager.create_kv_cache(options);
  helicore::kv::KVCache& cache = *sequence.cache;
  const int32_t found = cache.num_reused_tokens();
  if (!cache.resume() || !cache.resize(length)) return false;

  const auto group = manager.layer_group_id(0);
  const auto table = cache.base_page_indices(group);
  std::vector<int64_t> slots;
  for (int32_t position = found; position < length; ++position) {
    const int64_t page = table[static_cast<size_t>(position / kTokensPerBlock)];
    slots.push_back(page * kTokensPerBlock + position % kTokensPerBlock);
  }
  const int32_t* fresh = sequence.tokens.data() + found;
  for (int32_t layer = 0; layer < kNumLayers; ++layer) {
    auto rows = example::latent_rows(layer, fresh, found, length - found);
    helicore::attention::MlaAppendArgs args;
    args.kv_a =
        helicore::make_view(rows.data(), helicore::DType::kFloat32, {length - found, kRowDim});
    args.cache = layer_cache(manager, layer);
    args.slots =
        helicore::make_view(slots.data(), helicore::DType::kInt64, {int64_t{length} - found});
    args.kv_lora_rank = kLatentDim;
    helicore::attention::mla_append(args);
  }
  if (!cache.resize(std::nullopt, length)) return false;
  cache.commit({fresh, static_cast<size_t>(length - found)});
  std::printf("sequence of %d tokens: tokens found in the cache: %d, pages: %d\n", length, found,
              cache.num_blocks());
  return true;
}

// The page tables of all sequences side by side: [sequences, kMaxBlocks].
std::vector<int32_t> block_table(const helicore::kv::KVCacheManager& manager,
                                 const std::vector<Sequence>& sequences) {
  std::vector<int32_t> table;
  for (const Sequence& sequence : sequences) {
    const auto row = sequence.cache->base_page_indices(manager.layer_group_id(0));
    table.insert(table.end(), row.begin(), row.end());
    table.resize(table.size() + kMaxBlocks - row.size(), helicore::kv::kBadPageIndex);
  }
  return table;
}

// One query per sequence over all its tokens. Returns the largest error against the plain loop.
double decode_layer(const helicore::kv::KVCacheManager& manager,
                    const std::vector<Sequence>& sequences, int32_t layer) {
  using helicore::DType;
  using helicore::make_view;
  const auto batch = static_cast<int32_t>(sequences.size());
  auto table = block_table(manager, sequences);
  auto q = example::queries(layer, batch);
  std::vector<int32_t> cu_q(sequences.size() + 1);
  std::iota(cu_q.begin(), cu_q.end(), 0);
  std::vector<int32_t> kv_len;
  for (const Sequence& s : sequences) kv_len.push_back(static_cast<int32_t>(s.tokens.size()));
  std::vector<float> out(sequences.size() * kNumHeads * kLatentDim);

  helicore::attention::MlaDecodeArgs args;
  args.q = make_view(q.data(), DType::kFloat32, {batch, kNumHeads, kRowDim});
  args.cache = layer_cache(manager, layer);
  args.block_table = make_view(table.data(), DType::kInt32, {batch, kMaxBlocks});
  args.cu_q = make_view(cu_q.data(), DType::kInt32, {batch + 1});
  args.kv_len = make_view(kv_len.data(), DType::kInt32, {batch});
  args.scale = 1.0f / std::sqrt(static_cast<float>(kRowDim));
  args.out = make_view(out.data(), DType::kFloat32, {batch, kNumHeads, kLatentDim});
  helicore::attention::mla_decode(args);

  double worst = 0.0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto rows = example::latent_rows(layer, sequences[i].tokens.data(), 0, kv_len[i]);
    const auto expected =
        example::plain_attention(q.data() + i * kNumHeads * kRowDim, rows, double{args.scale});
    for (size_t j = 0; j < expected.size(); ++j) {
      worst = std::max(worst, std::abs(expected[j] - double{out[i * expected.size() + j]}));
    }
  }
  return worst;
}

int run() {
  helicore::kv::KVCacheManager manager(manager_config());
  std::vector<Sequence> sequences(2);
  for (int32_t i = 0; i < 2; ++i) {  // 50 tokens in common, then a tail of their own
    auto& tokens = sequences[static_cast<size_t>(i)].tokens;
    tokens.resize(50);
    std::iota(tokens.begin(), tokens.end(), 100);
    for (int32_t j = 0; j < 20 + 7 * i; ++j) tokens.push_back(1000 * (i + 1) + j);
  }
  for (Sequence& sequence : sequences) {
    if (!prefill(manager, sequence)) {
      std::printf("no room for %zu tokens\n", sequence.tokens.size());
      return 1;
    }
  }
  for (int32_t layer = 0; layer < kNumLayers; ++layer) {
    const double error = decode_layer(manager, sequences, layer);
    std::printf("layer %d: largest error %.2e\n", layer, error);
    if (!(error < 1e-5)) {
      std::printf("the result differs from the plain loop\n");
      return 1;
    }
  }
  std::printf("the result agrees with the plain loop (%d threads)\n", helicore::num_threads());
  for (Sequence& sequence : sequences) sequence.cache->close();
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "decode_step: %s\n", error.what());
    return 1;
  }
}
