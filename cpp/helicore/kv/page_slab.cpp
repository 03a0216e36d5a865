#include "helicore/kv/page_slab.h"

#include <memory>

namespace helicore::kv {

PageId PageSlab::allocate() noexcept {
  PageId id = free_head_;
  if (id == kNoPage) {
    id = PageId(static_cast<uint32_t>(records_.size()));
    records_.emplace_back();
  } else {
    free_head_ = records_[id.value()].next;
  }
  PageRecord& record = records_[id.value()];
  const uint32_t generation = record.generation;
  std::construct_at(&record);  // in place: a temporary's parts would be read back before they land
  record.generation = generation;
  record.in_use = true;
  ++num_in_use_;
  return id;
}

void PageSlab::free(PageId id) noexcept {
  PageRecord& record = records_[id.value()];
  ++record.generation;
  record.in_use = false;
  record.next = free_head_;
  free_head_ = id;
  --num_in_use_;
}

}  // namespace helicore::kv
