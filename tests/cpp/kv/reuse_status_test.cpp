#include "helicore/kv/reuse_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr LifeCycleId kRequired{0}, kOptional{1}, kPrivate{2};

TEST(MissingRows, what_is_left_of_a_range_is_told_in_order) {
  MissingRows missing;
  missing.add(0, {8, 12});
  missing.add(0, {4, 6});
  missing.add(1, {0, 4});
  missing.add(0, {3, 3});
  EXPECT_THAT(missing.remaining(0, {0, 14}),
              ElementsAre(TokenRange{0, 4}, TokenRange{6, 8}, TokenRange{12, 14}));
  EXPECT_THAT(missing.remaining(0, {5, 10}), ElementsAre(TokenRange{6, 8}));
  EXPECT_THAT(missing.remaining(0, {8, 12}), IsEmpty());
  EXPECT_TRUE(missing.overlaps(0, {0, 5}));
  EXPECT_FALSE(missing.overlaps(0, {0, 4}));
  missing.cut(10);
  EXPECT_THAT(missing.remaining(0, {8, 12}), ElementsAre(TokenRange{10, 12}));
  missing.remove(0, {4, 8});
  EXPECT_THAT(missing.remaining(0, {0, 8}), ElementsAre(TokenRange{0, 8}));
}

// A layer of each policy; 64 bytes per block of 4 tokens, `blocks` per level, pool groups apart.
class ReuseStatusTest : public ::testing::Test {
 protected:
  void make(const std::vector<int32_t>& blocks) {
    KVCacheManagerConfig config;
    config.tokens_per_block = 4;
    config.layers = {
        AttentionLayerConfig{.layer_id = 0, .buffers = {{"k", 64}}},
        AttentionLayerConfig{
            .layer_id = 1, .buffers = {{"k", 48}}, .reuse_policy = ReusePolicy::kOptional},
        AttentionLayerConfig{
            .layer_id = 2, .buffers = {{"k", 32}}, .reuse_policy = ReusePolicy::kPrivate}};
    config.initial_pool_ratio = {64.0 / 144, 48.0 / 144, 32.0 / 144};
    config.max_util_for_resume = 1.0;
    for (int32_t count : blocks) config.cache_tiers.push_back(HostCacheTierConfig{144 * count});
    auto owned = std::make_unique<FakeDevice>(FakeOptions{.type = DeviceType::kCpu});
    device_ = owned.get();
    device_->set_grain(16);
    manager_ = std::make_unique<KVCacheManager>(config, std::move(owned));
  }
  void put(int32_t num_tokens) {
    auto cache = started(num_tokens);
    cache->commit(iota_tokens(num_tokens));
    cache->close();
  }
  std::unique_ptr<KVCache> started(int32_t num_tokens) {
    auto cache = manager_->create_kv_cache();
    EXPECT_TRUE(cache->resume());
    EXPECT_TRUE(cache->resize(num_tokens));
    return cache;
  }
  // As an eviction does.
  void evict_optional(int32_t num_tokens, int32_t block) {
    const auto prompt = iota_tokens(num_tokens);
    PageId page = kNoPage;
    {
      auto cache = manager_->create_kv_cache({.input_tokens = prompt});
      page = Introspection::pages(*cache)[static_cast<size_t>(block) * 3 + 1].id;
    }
    ASSERT_NE(page, kNoPage);
    (void)Introspection::state(*manager_).tree.drop(page);
  }
  std::unique_ptr<KVCache> found(int32_t num_tokens) {
    prompt_ = iota_tokens(num_tokens);
    return manager_->create_kv_cache({.input_tokens = prompt_});
  }
  // Fails the copy of the OPTIONAL page of a block, the next time it is moved.
  void fail_optional(const KVCache& cache, int32_t block) {
    failing_ = Introspection::pages(cache)[static_cast<size_t>(block) * 3 + 1];
  }

  FakeDevice* device_ = nullptr;
  std::unique_ptr<KVCacheManager> manager_;
  std::vector<TokenId> prompt_;
  PageHandle failing_{};
};

TEST_F(ReuseStatusTest, what_creation_found_is_told_for_each_group) {
  make({8});
  put(12);
  evict_optional(12, 1);
  auto cache = found(12);
  EXPECT_EQ(cache->num_committed_tokens(), 12) << "an OPTIONAL group shortens nothing";
  const auto status = cache->reuse_status();
  ASSERT_EQ(status.size(), 3u);
  EXPECT_EQ(status[0].group, kRequired);
  EXPECT_TRUE(status[0].complete);
  EXPECT_THAT(status[0].coverage, ElementsAre(TokenRange{0, 12}));
  EXPECT_EQ(status[1].group, kOptional);
  EXPECT_EQ(status[1].policy, ReusePolicy::kOptional);
  EXPECT_FALSE(status[1].complete);
  EXPECT_EQ(status[1].endpoint, 12);
  EXPECT_THAT(status[1].coverage, ElementsAre(TokenRange{0, 4}, TokenRange{8, 12}));
  EXPECT_EQ(status[2].group, kPrivate);
  EXPECT_FALSE(status[2].complete);
  EXPECT_EQ(status[2].endpoint, 0);
  EXPECT_THAT(status[2].coverage, IsEmpty());
  ASSERT_TRUE(cache->resume());
  EXPECT_NE(cache->base_page_indices(kOptional)[1], kBadPageIndex) << "an empty page";
  auto fork = cache->fork();
  EXPECT_EQ(fork->reuse_status()[1].coverage, status[1].coverage);
  cache->close();
  EXPECT_THAT(cache->reuse_status(), IsEmpty());
}

TEST_F(ReuseStatusTest, a_cache_that_found_nothing_has_all_it_needs) {
  make({8});
  auto cache = manager_->create_kv_cache();
  for (const ReuseStatus& status : cache->reuse_status()) {
    EXPECT_TRUE(status.complete);
    EXPECT_EQ(status.endpoint, 0);
  }
}

TEST_F(ReuseStatusTest, groups_that_are_not_selected_begin_empty) {
  make({8});
  put(8);
  auto cache = found(8);
  const std::vector<LifeCycleId> wrong{kOptional, kRequired};
  EXPECT_THROW(cache->select_optional_reuse(wrong), InvalidArgument);
  EXPECT_THROW(cache->select_optional_reuse(std::vector{LifeCycleId(7)}), InvalidArgument);
  EXPECT_TRUE(cache->reuse_status()[1].complete) << "nothing changed";
  cache->select_optional_reuse(std::vector{kOptional});
  EXPECT_TRUE(cache->reuse_status()[1].complete);
  cache->select_optional_reuse({});
  EXPECT_THAT(cache->reuse_status()[1].coverage, IsEmpty());
  EXPECT_THAT(cache->reuse_status()[0].coverage, ElementsAre(TokenRange{0, 8}));
  ASSERT_TRUE(cache->resume());
  EXPECT_THROW(cache->select_optional_reuse({}), LogicError);
  cache->suspend();
  EXPECT_THROW(cache->select_optional_reuse({}), LogicError)
      << "the choice of the first resume stays";
  ASSERT_TRUE(cache->resume());
  Introspection::check(*manager_);
}

TEST_F(ReuseStatusTest, rows_that_are_missing_are_not_shown_to_others) {
  make({8});
  put(8);
  auto cache = found(6);  // ends inside the second block
  ASSERT_EQ(cache->num_committed_tokens(), 6);
  cache->select_optional_reuse({});
  ASSERT_TRUE(cache->resume() && cache->resize(8));
  cache->commit(std::vector<TokenId>{70, 71});
  cache->close();
  std::vector<TokenId> tokens = iota_tokens(6);
  tokens.insert(tokens.end(), {70, 71});
  auto next = manager_->create_kv_cache({.input_tokens = tokens});
  ASSERT_EQ(next->num_committed_tokens(), 8);
  EXPECT_THAT(next->reuse_status()[0].coverage, ElementsAre(TokenRange{0, 8}));
  EXPECT_THAT(next->reuse_status()[1].coverage, ElementsAre(TokenRange{0, 4}))
      << "rows 4 and 5 of the block were never written";
}

TEST_F(ReuseStatusTest, a_loss_while_suspended_leaves_the_group_empty_there) {
  make({4, 9});
  auto cache = started(8);
  cache->commit(iota_tokens(8));
  cache->suspend();
  fail_optional(*cache, 1);
  device_->set_failing_tag(failing_.tag());
  auto filler = started(16);
  device_->run_all();
  filler->close();
  EXPECT_EQ(manager_->stats().lost_pages, 1u);
  EXPECT_FALSE(cache->is_lost());
  EXPECT_EQ(manager_->probe_reuse(iota_tokens(8)), 8) << "what is REQUIRED stays";
  const auto status = cache->reuse_status();
  EXPECT_THAT(status[0].coverage, ElementsAre(TokenRange{0, 8}));
  EXPECT_THAT(status[1].coverage, ElementsAre(TokenRange{0, 4}));
  EXPECT_THAT(status[2].coverage, ElementsAre(TokenRange{0, 8}));
  ASSERT_TRUE(cache->resume()) << describe(*cache->last_failure());
  EXPECT_NE(cache->base_page_indices(kOptional)[1], kBadPageIndex);
  Introspection::check(*manager_);
}

TEST_F(ReuseStatusTest, a_load_that_fails_does_not_keep_the_cache_from_being_resumed) {
  make({4, 9});
  put(8);
  started(16)->close();  // sends the prefix down
  auto cache = found(6);
  ASSERT_EQ(cache->cached_tokens_by_level()[1], 6);
  fail_optional(*cache, 0);
  device_->set_failing_tag(failing_.tag());
  ASSERT_TRUE(cache->resume());
  EXPECT_FALSE(cache->is_lost());
  EXPECT_THAT(cache->reuse_status()[0].coverage, ElementsAre(TokenRange{0, 6}));
  EXPECT_THAT(cache->reuse_status()[1].coverage, ElementsAre(TokenRange{4, 6}));
  EXPECT_NE(cache->base_page_indices(kOptional)[0], kBadPageIndex);
  EXPECT_EQ(manager_->probe_reuse(iota_tokens(8)), 8);
  cache->close();
  Introspection::check(*manager_);
}

TEST_F(ReuseStatusTest, a_resume_that_loses_its_pages_is_no_first_resume) {
  make({4, 9});
  put(8);
  started(16)->close();  // sends the prefix down
  auto cache = found(8);
  device_->set_failing_tag(Introspection::pages(*cache)[0].tag());
  ASSERT_FALSE(cache->resume());
  EXPECT_TRUE(cache->last_failure()->data_lost);
  cache->select_optional_reuse({});
  EXPECT_THAT(cache->reuse_status()[1].coverage, IsEmpty());
  cache->close();
  Introspection::check(*manager_);
}

TEST_F(ReuseStatusTest, a_required_group_that_is_lost_still_ends_the_cache) {
  make({4, 9});
  auto cache = started(8);
  cache->suspend();
  device_->set_failing_tag(Introspection::pages(*cache)[0].tag());
  auto filler = started(16);
  device_->run_all();
  filler->close();
  EXPECT_FALSE(cache->resume());
  EXPECT_TRUE(cache->last_failure()->data_lost);
}

}  // namespace
}  // namespace helicore::kv::testing
