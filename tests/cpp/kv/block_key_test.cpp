#include "helicore/kv/block_key.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

namespace helicore::kv {
namespace {

std::vector<ReuseScope> different_scopes() {
  using namespace std::string_literals;
  return {
      {},
      {.salt = ""s},
      {.salt = "X"s},
      {.salt = "1"s},
      {.salt = int64_t{1}},
      {.salt = int64_t{0}},
      {.salt = int64_t{-1}},
      {.salt = "X\0"s},
      {.salt = std::string(16, '\0')},
      {.lora_id = 0},
      {.lora_id = 1},
      {.lora_id = 'X'},
      {.lora_id = 1, .lora_generation = 1},
      {.lora_id = 1, .salt = "X"s},
      {.lora_id = 1, .salt = int64_t{1}},
      {.lora_id = 1, .salt = ""s},
      {.lora_id = 1, .salt = "X"s, .lora_generation = 1},
      {.lora_id = int64_t{1} << 40},
  };
}

TEST(BlockKey, no_two_sources_of_a_scope_can_be_taken_for_each_other) {
  std::set<std::string> encodings;
  std::set<Digest> keys;
  for (const ReuseScope& scope : different_scopes()) {
    EXPECT_TRUE(encodings.insert(encode_scope(scope)).second);
    EXPECT_TRUE(keys.insert(root_key(scope)).second);
    EXPECT_EQ(encode_scope(scope), encode_scope(ReuseScope(scope))) << "equal scopes, equal bytes";
  }
}

TEST(BlockKey, a_payload_that_looks_like_another_field_stays_a_payload) {
  // The text salt holds the bytes of a whole adapter field; its length prefix keeps it apart.
  const std::string field = encode_scope({.lora_id = 1}).substr(5);
  EXPECT_NE(encode_scope({.salt = field}), encode_scope({.lora_id = 1, .salt = std::string()}));
  EXPECT_NE(root_key({.salt = field}), root_key({.lora_id = 1}));
}

TEST(BlockKey, a_reloaded_adapter_has_other_keys) {
  EXPECT_NE(root_key({.lora_id = 2}), root_key({.lora_id = 1}));
  EXPECT_NE(root_key({.lora_id = 1, .lora_generation = 1}), root_key({.lora_id = 1}));
}

TEST(BlockKey, tokens_that_a_polynomial_hash_confuses_have_different_keys) {
  const Digest root = root_key({});
  const std::vector<TokenId> a{100, 200, 300, 400};
  for (size_t i = 0; i + 1 < a.size(); ++i) {
    std::vector<TokenId> b = a;
    b[i] += 1;
    b[i + 1] -= 31;  // 31 * x + y is unchanged
    EXPECT_NE(block_key(root, a), block_key(root, b));
    std::vector<TokenId> c = a;
    std::swap(c[i], c[i + 1]);
    EXPECT_NE(block_key(root, a), block_key(root, c));
  }
}

TEST(BlockKey, seventy_thousand_random_identities_give_seventy_thousand_keys) {
  // Ids of pictures, say, spread over the tokens of a block; a key cut to 16 bits would meet itself
  // at once.
  std::mt19937_64 random(1);
  const Digest root = root_key({});
  std::set<Digest> keys;
  std::set<uint16_t> cut;  // the control: what 16 bits make of it
  for (int i = 0; i < 70000; ++i) {
    const std::array<TokenId, 4> tokens{static_cast<TokenId>(random() >> 33),
                                        static_cast<TokenId>(random() >> 33), 7, 8};
    const Digest key = block_key(root, tokens);
    keys.insert(key);
    cut.insert(static_cast<uint16_t>(key[0] << 8 | key[1]));
  }
  EXPECT_EQ(keys.size(), 70000u);
  EXPECT_LT(cut.size(), 70000u);
}

TEST(BlockKey, a_key_depends_on_its_parent_and_on_the_token_count) {
  const std::vector<TokenId> tokens{1, 2, 3, 0};
  const Digest a = block_key(root_key({}), tokens);
  EXPECT_NE(block_key(a, tokens), a);
  EXPECT_NE(block_key(root_key({}), std::span(tokens).first(3)), a);
}

TEST(BlockKey, the_preimage_is_the_documented_one) {
  const Digest parent = root_key({});
  const std::vector<TokenId> tokens{0x01020304, 5};
  std::vector<uint8_t> bytes{'K', 'B', 1, 1, 2, 0, 0, 0};
  bytes.insert(bytes.end(), parent.begin(), parent.end());
  for (uint8_t byte : {4, 3, 2, 1, 5, 0, 0, 0}) bytes.push_back(byte);
  EXPECT_EQ(block_key(parent, tokens), sha256(bytes));
}

}  // namespace
}  // namespace helicore::kv
