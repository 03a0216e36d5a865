// Blocks whose bytes follow from their chain key, so that a wrong page can't look right, and the
// calls that tests of the prefix store make over and over.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "helicore/kv/prefix_store.h"

namespace helicore::kv::testing {

inline constexpr int32_t kTokensPerBlock = 4;
inline constexpr int64_t kBlockBytes = 600;  // three pieces, none aligned

struct TestBlock {
  Digest key{};
  Digest parent{};
  int32_t ordinal = 0;
  std::vector<TokenId> tokens{};
  std::vector<std::byte> bytes{};

  [[nodiscard]] PutBlock put() {
    const auto third = static_cast<int64_t>(bytes.size()) / 3;
    return {parent,
            ordinal,
            tokens,
            {{bytes.data(), third},
             {bytes.data() + third, third + 1},
             {bytes.data() + 2 * third + 1, static_cast<int64_t>(bytes.size()) - 2 * third - 1}}};
  }
};

inline std::vector<std::byte> bytes_of_key(const Digest& key, int64_t count) {
  uint64_t seed = 0;
  std::memcpy(&seed, key.data(), sizeof(seed));
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline Digest root_of(int64_t salt) { return root_key(ReuseScope{.salt = salt}); }

// The blocks of a token sequence; the last may be partial.
inline std::vector<TestBlock> make_chain(const Digest& root, std::vector<TokenId> tokens,
                                         int64_t block_bytes = kBlockBytes,
                                         int32_t tokens_per_block = kTokensPerBlock) {
  std::vector<TestBlock> chain;
  Digest parent = root;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(tokens_per_block)) {
    const size_t end = std::min(tokens.size(), at + static_cast<size_t>(tokens_per_block));
    TestBlock block;
    block.parent = parent;
    block.ordinal = static_cast<int32_t>(chain.size());
    block.tokens.assign(tokens.begin() + static_cast<ptrdiff_t>(at),
                        tokens.begin() + static_cast<ptrdiff_t>(end));
    block.key = parent = block_key(block.parent, block.tokens);
    block.bytes = bytes_of_key(block.key, block_bytes);
    chain.push_back(std::move(block));
  }
  return chain;
}

inline std::vector<TokenId> tokens_from(TokenId first, size_t count) {
  std::vector<TokenId> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<TokenId>(i);
  return tokens;
}

inline PrefixStoreConfig small_config(const std::string& directory, int64_t num_slots = 64) {
  PrefixStoreConfig config;
  config.directory = directory;
  config.capacity_bytes = num_slots * 4096;
  config.block_bytes = kBlockBytes;
  config.tokens_per_block = kTokensPerBlock;
  config.stamp[0] = 42;
  config.io.num_threads = 2;
  return config;
}

inline std::vector<BlockStatus> put_all(PrefixStore& store, std::vector<TestBlock>& blocks,
                                        PagePolicy policy = PagePolicy::kCopy) {
  std::vector<PutBlock> puts;
  for (TestBlock& block : blocks) puts.push_back(block.put());
  return store.wait(*store.put(puts, policy, WhenFull::kBlock));
}

struct Fetched {
  int num_matched = 0;
  int num_ok = 0;
  int num_wrong = 0;  // served with other bytes than its key demands
  int num_corrupt = 0;
  int num_failed = 0;  // other statuses
};

// Matches a chain and reads what was found.
inline Fetched fetch(PrefixStore& store, const Digest& root, const std::vector<TestBlock>& chain) {
  std::vector<TokenId> tokens;
  for (const auto& block : chain) {
    tokens.insert(tokens.end(), block.tokens.begin(), block.tokens.end());
  }
  const PrefixMatch match = store.match(root, tokens);
  std::vector<std::vector<std::byte>> pages(match.blocks.size());
  std::vector<GetBlock> gets;
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i].resize(chain[i].bytes.size(), std::byte{0xee});
    const auto half = static_cast<int64_t>(pages[i].size()) / 2;
    gets.push_back({match.blocks[i],
                    {{pages[i].data(), half},
                     {pages[i].data() + half, static_cast<int64_t>(pages[i].size()) - half}}});
  }
  const auto statuses = store.wait(*store.get(gets, WhenFull::kBlock));
  Fetched fetched;
  fetched.num_matched = static_cast<int>(match.blocks.size());
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i] == BlockStatus::kOk) {
      ++fetched.num_ok;
      fetched.num_wrong += pages[i] == chain[i].bytes ? 0 : 1;
    } else if (statuses[i] == BlockStatus::kCorrupt) {
      ++fetched.num_corrupt;
    } else {
      ++fetched.num_failed;
    }
  }
  return fetched;
}

}  // namespace helicore::kv::testing
