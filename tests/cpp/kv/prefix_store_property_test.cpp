// Random operations on a prefix store against a naive model of its contents and order of eviction,
// and journals read back against what was written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <random>

#include "helicore/kv/prefix_store.h"
#include "helicore/kv/prefix_store_format.h"
#include "kv/prefix_blocks.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

enum class ModelFault : uint8_t { kNone, kForgetsUse, kEvictsParents, kCountsTokensWrong };

// The rules, one by one, over a plain list: most recently used first.
class NaiveStore {
 public:
  NaiveStore(size_t num_slots, ModelFault fault) : num_slots_(num_slots), fault_(fault) {}

  BlockStatus put(const TestBlock& block) {
    if (find(block.key) != blocks_.end()) return BlockStatus::kDuplicate;
    auto parent = blocks_.end();
    if (block.ordinal > 0) {
      parent = find(block.parent);
      if (parent == blocks_.end() || parent->tokens.size() != kTokensPerBlock) {
        return BlockStatus::kNoParent;
      }
    }
    if (blocks_.size() == num_slots_ && !evict_but(block.parent)) return BlockStatus::kNoRoom;
    // Evicting never takes the parent, so the iterator is still good.
    blocks_.insert(parent == blocks_.end() ? blocks_.begin() : std::next(parent), block);
    return BlockStatus::kOk;
  }

  size_t match(const std::vector<TestBlock>& chain) {
    size_t depth = 0;
    while (depth < chain.size() && find(chain[depth].key) != blocks_.end()) ++depth;
    if (fault_ == ModelFault::kForgetsUse) return depth;
    for (size_t i = depth; i-- > 0;) {
      blocks_.splice(blocks_.begin(), blocks_, find(chain[i].key));
    }
    return fault_ == ModelFault::kCountsTokensWrong && depth > 2 ? depth - 1 : depth;
  }

 private:
  std::list<TestBlock>::iterator find(const Digest& key) {
    return std::ranges::find_if(blocks_, [&](const TestBlock& b) { return b.key == key; });
  }
  bool evict_but(const Digest& parent) {
    for (auto it = blocks_.end(); it != blocks_.begin();) {
      --it;
      const bool leaf = std::ranges::none_of(
          blocks_, [&](const TestBlock& b) { return b.ordinal > 0 && b.parent == it->key; });
      if ((leaf || fault_ == ModelFault::kEvictsParents) && it->key != parent) {
        blocks_.erase(it);
        return true;
      }
    }
    return false;
  }

  size_t num_slots_;
  ModelFault fault_;
  std::list<TestBlock> blocks_;
};

struct Outcome {
  int num_differences = 0;
  int num_evictions = 0;
  int64_t num_compactions = 0;
};

std::vector<TestBlock> random_chain(std::mt19937& random, int64_t* salt) {
  *salt = static_cast<int64_t>(random() % 3);
  std::vector<TokenId> tokens;
  const size_t num_blocks = 1 + random() % 5;
  for (size_t b = 0; b < num_blocks; ++b) {
    const auto part = tokens_from(static_cast<TokenId>(1000 * (random() % 3)), kTokensPerBlock);
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  if (random() % 4 == 0) tokens.resize(tokens.size() - 1 - random() % 3);
  return make_chain(root_of(*salt), tokens);
}

Outcome run(int num_ops, ModelFault fault, uint32_t seed) {
  const TempDir dir;
  auto config = small_config(dir.file("store"), 20);
  config.io.backend = seed % 2 == 0 ? IoBackend::kAuto : IoBackend::kThreads;
  auto store = PrefixStore::open(config);
  NaiveStore model(20, fault);
  std::mt19937 random(seed);
  Outcome outcome;
  for (int op = 0; op < num_ops && outcome.num_differences == 0; ++op) {
    int64_t salt = 0;
    auto chain = random_chain(random, &salt);
    const uint32_t kind = random() % 4000;
    if (kind < 2) {  // a restart keeps contents and order of use
      outcome.num_compactions += store->stats().num_compactions;
      outcome.num_evictions += static_cast<int>(store->stats().num_evicted);
      store.reset();
      store = PrefixStore::open(config);
    } else if (kind < 2000) {
      // One block at a time: a batch evicts for all of its blocks at once.
      for (TestBlock& block : chain) {
        const PutBlock put = block.put();
        const auto status =
            store->wait(*store->put({&put, 1}, PagePolicy::kCopy, WhenFull::kBlock))[0];
        outcome.num_differences += status == model.put(block) ? 0 : 1;
      }
    } else {
      const Fetched fetched = fetch(*store, root_of(salt), chain);
      outcome.num_differences += static_cast<size_t>(fetched.num_matched) == model.match(chain) &&
                                         fetched.num_ok == fetched.num_matched &&
                                         fetched.num_wrong == 0
                                     ? 0
                                     : 1;
    }
    if (op % 50 == 0) store->check_invariants();
  }
  outcome.num_compactions += store->stats().num_compactions;
  outcome.num_evictions += static_cast<int>(store->stats().num_evicted);
  return outcome;
}

TEST(PrefixStorePropertyTest, random_operations_agree_with_the_naive_model) {
  for (const uint32_t seed : {1U, 2U}) {
    const Outcome outcome = run(10000, ModelFault::kNone, seed);
    EXPECT_EQ(outcome.num_differences, 0) << "seed " << seed;
    EXPECT_GT(outcome.num_evictions, 1000);
    EXPECT_GT(outcome.num_compactions, 1);
  }
}

TEST(PrefixStorePropertyTest, a_wrong_model_is_caught) {
  for (const auto fault :
       {ModelFault::kForgetsUse, ModelFault::kEvictsParents, ModelFault::kCountsTokensWrong}) {
    EXPECT_GT(run(5000, fault, 3).num_differences, 0) << static_cast<int>(fault);
  }
}

TEST(PrefixStorePropertyTest, records_read_back_as_written_and_any_changed_byte_is_refused) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    store::Header header{.tokens_per_block = 1 + static_cast<int32_t>(random() % 9),
                         .block_bytes = 77,
                         .num_slots = 5,
                         .epoch = random()};
    const auto number = [&random] { return static_cast<uint32_t>(random()); };
    store::PutRecord put{number(), static_cast<int32_t>(number() % 9), number(), number(), {}, {}};
    for (auto& byte : put.parent) byte = static_cast<uint8_t>(random());
    put.tokens = tokens_from(static_cast<TokenId>(random()),
                             1 + number() % static_cast<uint32_t>(header.tokens_per_block));
    const store::TombstoneRecord tombstone{number(), number()};
    std::vector<std::byte> bytes;
    store::append_put(bytes, put, header);
    ASSERT_EQ(bytes.size(), store::put_record_bytes(header.tokens_per_block));
    store::append_tombstone(bytes, tombstone, header);
    store::Record record;
    const size_t size = store::decode_record(bytes, header, &record);
    ASSERT_EQ(size, store::put_record_bytes(header.tokens_per_block));
    EXPECT_EQ(std::get<store::PutRecord>(record), put);
    EXPECT_EQ(store::decode_record(std::span(bytes).subspan(size), header, &record),
              store::tombstone_record_bytes());
    EXPECT_EQ(std::get<store::TombstoneRecord>(record), tombstone);
    EXPECT_EQ(store::decode_record(std::span(bytes).first(size - 1), header, &record), 0U);
    for (size_t at = 0; at < size; ++at) {
      auto broken = bytes;
      broken[at] ^= std::byte{1};
      EXPECT_EQ(store::decode_record(broken, header, &record), 0U) << at;
    }
    ++header.epoch;
    EXPECT_EQ(store::decode_record(bytes, header, &record), 0U) << "of another journal";
    store::Header again;
    std::string reason;
    EXPECT_TRUE(store::decode_header(store::encode_header(header), &again, &reason));
    EXPECT_EQ(again, header);
  }
}

}  // namespace
}  // namespace helicore::kv::testing
