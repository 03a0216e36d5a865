#include "helicore/kv/page_slab.h"

#include <gtest/gtest.h>

namespace helicore::kv {
namespace {

TEST(PageSlab, a_handle_is_stale_once_its_record_is_freed_and_reused) {
  PageSlab pages(2);
  const PageHandle first = pages.handle(pages.allocate());
  EXPECT_TRUE(pages.is_current(first));
  pages.free(first.id);
  EXPECT_FALSE(pages.is_current(first));
  const PageHandle second = pages.handle(pages.allocate());
  EXPECT_EQ(second.id, first.id);
  EXPECT_FALSE(pages.is_current(first));
  EXPECT_TRUE(pages.is_current(second));
  EXPECT_EQ(pages.num_in_use(), 1u);
}

TEST(PageSlab, status_follows_from_the_counters) {
  PageRecord page;
  EXPECT_EQ(page.status(), PageStatus::kDroppable);
  page.hold_count = 1;
  EXPECT_EQ(page.status(), PageStatus::kHeld);
  page.lock_count = 1;
  EXPECT_EQ(page.status(), PageStatus::kLocked);
}

TEST(PageSlab, a_record_fits_the_memory_budget) { EXPECT_LE(sizeof(PageRecord), 48u); }

}  // namespace
}  // namespace helicore::kv
