#include "helicore/kv/slot_allocator.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>

#include "helicore/core/error.h"
#include "kv/fake_device.h"

namespace helicore::kv {
namespace {

const CacheDevice& device() {
  static const std::unique_ptr<CacheDevice> cpu = make_cache_device({});
  return *cpu;
}

// Releases `slot` although it is free; what must happen depends on the build.
void release_again(SlotAllocator& slots, SlotId slot) {
#ifdef HELICORE_DEBUG_CHECKS
  EXPECT_THROW(slots.release(slot, TimePoint(), device()), InternalError);
#else
  const uint64_t before = slots.num_double_releases();
  slots.release(slot, TimePoint(), device());
  EXPECT_EQ(slots.num_double_releases(), before + 1);
#endif
}

TEST(SlotAllocator, a_slot_released_twice_is_free_once) {
  SlotAllocator slots(4);
  const SlotId b = slots.allocate();
  (void)slots.allocate();
  slots.release(b, TimePoint(), device());
  release_again(slots, b);
  release_again(slots, b);
  EXPECT_EQ(slots.num_free(), 3);
  std::set<int32_t> handed_out;
  while (slots.num_free() > 0) handed_out.insert(slots.allocate().value());
  EXPECT_EQ(handed_out.size(), 3u) << "a slot went to two owners";
}

TEST(SlotAllocator, releasing_a_slot_that_was_never_handed_out_is_ignored_or_refused) {
  SlotAllocator slots(2);
  release_again(slots, SlotId(1));
  release_again(slots, SlotId(-1));
  release_again(slots, SlotId(2));
  EXPECT_EQ(slots.num_free(), 2);
}

TEST(SlotAllocator, recycles_the_oldest_release_before_a_fresh_slot) {
  SlotAllocator slots(4);
  const SlotId a = slots.allocate();
  const SlotId b = slots.allocate();
  slots.release(b, TimePoint(), device());
  slots.release(a, TimePoint(), device());
  EXPECT_EQ(slots.allocate(), b);
  EXPECT_EQ(slots.allocate(), a);
  EXPECT_EQ(slots.allocate(), SlotId(2));
}

// Else how much room there is would be a matter of how fast copies are.
TEST(SlotAllocator, a_slot_behind_a_step_and_a_copy_can_be_handed_out_once_the_step_is_done) {
  testing::FakeDevice fake({.type = DeviceType::kCpu});
  const StreamHandle stream = fake.make_step_stream();
  (void)fake.submit_step(stream);
  const auto pool = fake.make_pool({.tier = CacheTier::kHostMem, .num_bytes = 64, .max_bytes = 64});
  const CopyTask task{.dst = pool.get(), .src = pool.get(), .src_offset = 32, .num_bytes = 8};
  const TimePoint step = fake.record(stream);
  const TimePoint copied = fake.copy({&task, 1}, {&step, 1});
  SlotAllocator slots(1);
  slots.release(slots.allocate(), copied, fake);
  EXPECT_EQ(slots.num_parked(), 1);
  slots.settle(fake);
  EXPECT_EQ(slots.num_free(), 0);
  fake.complete_step(stream, 1);
  ASSERT_FALSE(fake.reached(copied));
  slots.settle(fake);
  EXPECT_EQ(slots.num_free(), 1);
  EXPECT_EQ(slots.after(SlotId(0)), copied) << "the next owner waits for the copy";
  (void)fake.run_all();
}

TEST(SlotAllocator, a_known_id_can_be_taken_wherever_it_waits) {
  SlotAllocator slots(5);
  for (int i = 0; i < 3; ++i) (void)slots.allocate();
  slots.release(SlotId(1), TimePoint(), device());
  slots.release(SlotId(0), TimePoint(), device());
  slots.release(SlotId(2), TimePoint(), device());
  EXPECT_TRUE(slots.take(SlotId(0)));
  EXPECT_FALSE(slots.take(SlotId(0))) << "it is in use";
  EXPECT_TRUE(slots.take(SlotId(3)));
  EXPECT_FALSE(slots.take(SlotId(5)));
  EXPECT_FALSE(slots.take(SlotId(-1)));
  EXPECT_EQ(slots.num_free(), 3);
  EXPECT_EQ(slots.allocate(), SlotId(1)) << "the others keep their order";
  EXPECT_EQ(slots.allocate(), SlotId(2));
  slots.set_limit(4, device());
  EXPECT_FALSE(slots.take(SlotId(4)));
}

TEST(SlotAllocator, an_empty_allocator_has_nothing_free) {
  SlotAllocator slots(0);
  EXPECT_EQ(slots.num_free(), 0);
}

TEST(SlotAllocator, random_use_agrees_with_a_set) {
  std::mt19937 random(3);
  SlotAllocator slots(70);
  std::vector<SlotId> held;
  std::set<int32_t> model;
  for (int i = 0; i < 20000; ++i) {
    if (slots.num_free() > 0 && (held.empty() || random() % 2 == 0)) {
      held.push_back(slots.allocate());
      ASSERT_TRUE(model.insert(held.back().value()).second) << "slot handed out twice";
    } else {
      const size_t at = random() % held.size();
      slots.release(held[at], TimePoint(), device());
      model.erase(held[at].value());
      held[at] = held.back();
      held.pop_back();
    }
    ASSERT_EQ(static_cast<size_t>(slots.num_free()) + model.size(), 70u);
    for (int32_t s = 0; s < 70; ++s) ASSERT_EQ(slots.in_use(SlotId(s)), model.count(s) > 0);
  }
}

}  // namespace
}  // namespace helicore::kv
