// Layout descriptions, statistics and reasons of helicore._core.kv.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "helicore/kv/kv_cache_manager.h"
#include "kv_casters.h"
#include "kv_values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using namespace helicore::kv;

void bind_descs(nb::module_& m) {
  nb::class_<BufferId> buffer(m, "BufferId", "A layer's buffer.");
  buffer.def(nb::init<int32_t, std::string>(), "layer_id"_a, "role"_a)
      .def_ro("layer_id", &BufferId::layer_id)
      .def_ro("role", &BufferId::role)
      .def("__len__", [](const BufferId&) { return 2; })
      .def("__iter__",
           [](const BufferId& self) -> nb::typed<nb::iterator, nb::object> {
             return nb::iter(nb::make_tuple(self.layer_id, self.role));
           })
      .def("__getitem__", [](const BufferId& self, int i) -> nb::object {
        if (i == 0 || i == -2) return nb::cast(self.layer_id);
        if (i == 1 || i == -1) return nb::cast(self.role);
        throw nb::index_error("BufferId index out of range");
      });
  add_value_semantics(buffer, "BufferId", {"layer_id", "role"});

  nb::class_<CoalescedBuffer> coalesced(
      m, "CoalescedBuffer", "Equal-size buffers that lie back to back in a slot, in this order.");
  coalesced.def_ro("single_buffer_size", &CoalescedBuffer::single_buffer_size)
      .def_ro("buffer_ids", &CoalescedBuffer::buffer_ids);
  add_value_semantics(coalesced, "CoalescedBuffer", {"single_buffer_size", "buffer_ids"});

  nb::class_<SlotDescVariant> variant(m, "SlotDescVariant",
                                      "How one layer group reads a slot: one entry per pool.");
  variant
      .def_prop_ro("layer_group_id", [](const SlotDescVariant& v) { return v.life_cycle.value(); })
      .def_ro("coalesced_buffers", &SlotDescVariant::coalesced_buffers);
  add_value_semantics(variant, "SlotDescVariant", {"layer_group_id", "coalesced_buffers"});

  nb::class_<PoolDesc>(m, "PoolDesc", "One pool: equal pieces of `slot_bytes` from `base_address`.")
      .def_prop_ro("pool_index", [](const PoolDesc& d) { return d.pool_index.value(); })
      .def_ro("base_address", &PoolDesc::base_address)
      .def_ro("slot_bytes", &PoolDesc::slot_bytes);
  nb::class_<PoolGroupDesc>(m, "PoolGroupDesc", "Pools that share slot ids.")
      .def_prop_ro("pool_group_index", [](const PoolGroupDesc& d) { return d.pool_group.value(); })
      .def_ro("domain", &PoolGroupDesc::domain)
      .def_ro("num_slots", &PoolGroupDesc::num_slots)
      .def_ro("pools", &PoolGroupDesc::pools)
      .def_ro("variants", &PoolGroupDesc::variants);

  nb::class_<ScratchDesc> scratch(
      m, "ScratchDesc", "The blocks [begin, end) of a step that share slots, and those slots.");
  scratch
      .def(
          "__init__",
          [](ScratchDesc* self, std::pair<int32_t, int32_t> range, std::vector<int32_t> slot_ids) {
            new (self) ScratchDesc{{range.first, range.second}, std::move(slot_ids)};
          },
          "range"_a, "slot_ids"_a)
      .def_prop_ro("range",
                   [](const ScratchDesc& d) { return std::pair(d.range.begin, d.range.end); })
      .def_ro("slot_ids", &ScratchDesc::slot_ids);
  add_value_semantics(scratch, "ScratchDesc", {"range", "slot_ids"});

  nb::class_<PageIndexConverter> converter(
      m, "PageIndexConverter", "Turns base page indices into the page indices of one buffer.");
  converter
      .def(nb::init<int32_t, int32_t, int32_t, int32_t, int32_t>(), "scale"_a, "expansion"_a,
           "layer_offset"_a, "scratch_pages_per_block"_a = 1, "scratch_page"_a = 0)
      .def_ro("scale", &PageIndexConverter::scale)
      .def_ro("expansion", &PageIndexConverter::expansion)
      .def_ro("layer_offset", &PageIndexConverter::layer_offset)
      .def_ro("scratch_pages_per_block", &PageIndexConverter::scratch_pages_per_block,
              "Buffers of the layer in the piece.")
      .def_ro("scratch_page", &PageIndexConverter::scratch_page, "Which of them this one is.")
      .def(
          "__call__",
          [](const PageIndexConverter& self, const Int32Arg& base, PageIndexMode mode,
             const std::optional<ScratchDesc>& blocks) {
            const auto indices = base.get("kv.PageIndexConverter", "base_indices");
            std::vector<int32_t> out(indices.size() * static_cast<size_t>(self.expansion));
            if (blocks) {
              self.convert(indices, out, mode, *blocks);
            } else {
              self.convert(indices, out, mode);
            }
            return out;
          },
          "base_indices"_a, "index_mode"_a = PageIndexMode::kShared, "scratch"_a = nb::none(),
          "Page indices of every block, from block 0 on; blocks of `scratch` need PER_LAYER.");
  add_value_semantics(
      converter, "PageIndexConverter",
      {"scale", "expansion", "layer_offset", "scratch_pages_per_block", "scratch_page"});
}

void bind_statistics(nb::module_& m) {
  nb::class_<NoRoom> reason(m, "NoRoom", "Why a resize or a resume returned False.");
  reason.def_ro("domain", &NoRoom::domain)
      .def_prop_ro("pool_group", [](const NoRoom& r) { return r.pool_group.value(); })
      .def_ro("level", &NoRoom::level)
      .def_ro("needed", &NoRoom::needed, "Slots that the call needed.")
      .def_ro("free", &NoRoom::free)
      .def_ro("evictable", &NoRoom::evictable)
      .def_ro("pending", &NoRoom::pending, "Slots that come free when a submitted step is done.")
      .def_ro("data_lost", &NoRoom::data_lost, "Pages could not be read back: close the cache.")
      .def_ro("over_utilisation", &NoRoom::over_utilisation,
              "Refused by max_util_for_resume, not by the count.")
      .def("__str__", &describe);
  add_value_semantics(reason, "NoRoom",
                      {"domain", "pool_group", "level", "needed", "free", "evictable", "pending",
                       "over_utilisation", "data_lost"});

  nb::class_<PoolGroupStatistics> group(m, "PoolGroupStatistics", "Slots of a pool group, now.");
  group.def_prop_ro("pool_group", [](const PoolGroupStatistics& s) { return s.pool_group.value(); })
      .def_ro("domain", &PoolGroupStatistics::domain)
      .def_ro("slot_sizes", &PoolGroupStatistics::slot_sizes)
      .def_ro("total", &PoolGroupStatistics::total)
      .def_ro("free", &PoolGroupStatistics::free)
      .def_ro("evictable", &PoolGroupStatistics::evictable)
      .def_ro("pending", &PoolGroupStatistics::pending)
      .def_prop_ro("available", &PoolGroupStatistics::available)
      .def_prop_ro("unavailable", &PoolGroupStatistics::unavailable);
  add_value_semantics(group, "PoolGroupStatistics",
                      {"pool_group", "domain", "slot_sizes", "total", "free", "evictable"});

  nb::class_<KVCacheStats> stats(m, "KVCacheStats", "Counters since the manager was made.");
  stats.def_ro("num_lookups", &KVCacheStats::num_lookups)
      .def_ro("lookup_tokens", &KVCacheStats::lookup_tokens)
      .def_ro("hit_tokens", &KVCacheStats::hit_tokens)
      .def_ro("full_reused_blocks", &KVCacheStats::full_reused_blocks)
      .def_ro("partial_reused_blocks", &KVCacheStats::partial_reused_blocks)
      .def_ro("missed_blocks", &KVCacheStats::missed_blocks)
      .def_ro("allocated_blocks", &KVCacheStats::allocated_blocks)
      .def_ro("committed_blocks", &KVCacheStats::committed_blocks)
      .def_ro("rebased_blocks", &KVCacheStats::rebased_blocks)
      .def_ro("evicted_blocks", &KVCacheStats::evicted_blocks)
      .def_ro("copied_blocks", &KVCacheStats::copied_blocks)
      .def_ro("lost_pages", &KVCacheStats::lost_pages)
      .def_ro("skipped_snapshots", &KVCacheStats::skipped_snapshots)
      .def_ro("num_forks", &KVCacheStats::num_forks)
      .def_ro("failed_resizes", &KVCacheStats::failed_resizes)
      .def_ro("failed_resumes", &KVCacheStats::failed_resumes)
      .def_ro("num_suspends", &KVCacheStats::num_suspends)
      .def_ro("num_resumes", &KVCacheStats::num_resumes);
  add_value_semantics(
      stats, "KVCacheStats",
      {"num_lookups", "lookup_tokens", "hit_tokens", "full_reused_blocks", "partial_reused_blocks",
       "missed_blocks", "allocated_blocks", "committed_blocks", "rebased_blocks", "evicted_blocks",
       "copied_blocks", "lost_pages", "skipped_snapshots", "num_forks", "failed_resizes",
       "failed_resumes", "num_suspends", "num_resumes"});
}

void bind_migration(nb::module_& m) {
  nb::class_<LifeCycleStats> pages(m, "LayerGroupStats",
                                   "Pages of one layer group since the manager was made.");
  pages.def_ro("domain", &LifeCycleStats::domain)
      .def_prop_ro("pool_group", [](const LifeCycleStats& s) { return s.pool_group.value(); })
      .def_ro("allocated_pages", &LifeCycleStats::allocated_pages, "New ones, copies included.")
      .def_ro("copied_pages", &LifeCycleStats::copied_pages, "Private copies of shared pages.")
      .def_ro("reused_pages", &LifeCycleStats::reused_pages, "Found at creation and held.")
      .def_ro("reused_tokens", &LifeCycleStats::reused_tokens, "In them.")
      .def_ro("committed_pages", &LifeCycleStats::committed_pages, "Became reusable.")
      .def_ro("released_pages", &LifeCycleStats::released_pages, "Went out of the window.");
  add_value_semantics(pages, "LayerGroupStats",
                      {"domain", "pool_group", "allocated_pages", "copied_pages", "reused_pages",
                       "reused_tokens", "committed_pages", "released_pages"});
  nb::class_<MigrationCounters> counters(m, "MigrationCounters",
                                         "Pages of one layer group that passed through one level.");
  counters.def_ro("offloaded_pages", &MigrationCounters::offloaded_pages, "Came from above.")
      .def_ro("offloaded_bytes", &MigrationCounters::offloaded_bytes)
      .def_ro("onboarded_pages", &MigrationCounters::onboarded_pages, "Left for above.")
      .def_ro("onboarded_bytes", &MigrationCounters::onboarded_bytes)
      .def_ro("unwritten_pages", &MigrationCounters::unwritten_pages,
              "Offloaded to a copy that was still there.")
      .def_ro("dropped_pages", &MigrationCounters::dropped_pages);
  add_value_semantics(counters, "MigrationCounters",
                      {"offloaded_pages", "offloaded_bytes", "onboarded_pages", "onboarded_bytes",
                       "unwritten_pages", "dropped_pages"});
}

}  // namespace

void bind_kv_layout(nb::module_& m) {
  bind_descs(m);
  bind_statistics(m);
  bind_migration(m);
}

}  // namespace helicore::bindings
