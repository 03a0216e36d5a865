#include "helicore/kv/eviction_queue.h"

#include <gtest/gtest.h>

#include <list>
#include <map>
#include <random>

namespace helicore::kv {
namespace {

TEST(EvictionQueue, lowest_priority_goes_first_and_then_the_oldest) {
  PageSlab pages(8);
  EvictionQueue queue;
  std::vector<PageId> ids;
  for (int priority : {50, 0, 100, 50, 64, 63}) {
    ids.push_back(pages.allocate());
    pages[ids.back()].priority = static_cast<uint8_t>(priority);
    queue.push_back(pages, ids.back());
  }
  std::vector<PageId> order;
  while (queue.count() > 0) {
    order.push_back(queue.front());
    queue.remove(pages, order.back());
  }
  EXPECT_EQ(order, (std::vector<PageId>{ids[1], ids[0], ids[3], ids[5], ids[4], ids[2]}));
  EXPECT_EQ(queue.front(), kNoPage);
}

TEST(EvictionQueue, random_use_agrees_with_ordered_lists) {
  std::mt19937 random(11);
  PageSlab pages(64);
  EvictionQueue queue;
  std::map<int, std::list<PageId>> model;
  std::vector<PageId> all;
  for (int i = 0; i < 64; ++i) all.push_back(pages.allocate());
  for (int i = 0; i < 20000; ++i) {
    const PageId id = all[random() % all.size()];
    if (pages[id].queued) {
      queue.remove(pages, id);
      model[pages[id].priority].remove(id);
    } else {
      pages[id].priority = static_cast<uint8_t>(random() % 101);
      queue.push_back(pages, id);
      model[pages[id].priority].push_back(id);
    }
    PageId expected = kNoPage;
    int32_t count = 0;
    for (const auto& [priority, list] : model) {
      count += static_cast<int32_t>(list.size());
      if (expected == kNoPage && !list.empty()) expected = list.front();
    }
    ASSERT_EQ(queue.front(), expected);
    ASSERT_EQ(queue.count(), count);
  }
}

}  // namespace
}  // namespace helicore::kv
