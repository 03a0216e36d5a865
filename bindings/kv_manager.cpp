// helicore._core.kv: the manager.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "gil.h"
#include "helicore/core/error.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv_casters.h"

namespace nb = nanobind;
using namespace nb::literals;

// Waits for copies that are under way.
template <>
void nanobind::detail::wrap_destruct<helicore::kv::KVCacheManager>(void* value) noexcept {
  helicore::bindings::destroy_without_gil<helicore::kv::KVCacheManager>(value);
}

namespace helicore::bindings {

void bind_recording_methods(nb::class_<kv::KVCacheManager>& cls);
void bind_sizing_methods(nb::class_<kv::KVCacheManager>& cls);

namespace {

using namespace helicore::kv;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using ScopeArg = std::variant<std::monostate, int64_t, ReuseScope>;
using PoolView = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>, nb::device::cpu>;

// None, a number (an adapter id) or a ReuseScope.
ReuseScope to_scope(const ScopeArg& arg) {
  if (const auto* scope = std::get_if<ReuseScope>(&arg)) return *scope;
  ReuseScope scope;
  if (const auto* lora_id = std::get_if<int64_t>(&arg)) scope.lora_id = *lora_id;
  return scope;
}

std::span<const int32_t> tokens_of(const std::optional<Int32Arg>& arg, const char* where) {
  return arg ? arg->get(where, "input_tokens") : std::span<const int32_t>();
}

nb::typed<nb::list, bool> to_bools(std::span<const uint8_t> results) {
  nb::list out;
  for (uint8_t ok : results) out.append(nb::handle(ok != 0 ? Py_True : Py_False));
  return out;
}

nb::typed<nb::list, nb::bytes> to_bytes(const std::vector<Digest>& keys) {
  nb::list out;
  for (const Digest& key : keys) {
    out.append(nb::bytes(reinterpret_cast<const char*>(key.data()), key.size()));
  }
  return out;
}

std::unique_ptr<KVCache> create(KVCacheManager& self, const ScopeArg& scope,
                                const std::optional<Int32Arg>& tokens, std::optional<int64_t> id,
                                int priority, std::optional<int64_t> expected_prompt_length,
                                const std::vector<RetentionRange>& retention) {
  const CreateOptions options{.reuse_scope = to_scope(scope),
                              .input_tokens = tokens_of(tokens, "kv.create_kv_cache"),
                              .id = id,
                              .priority = priority,
                              .expected_prompt_length = expected_prompt_length,
                              .retention = retention};
  const nb::gil_scoped_release release;
  return self.create_kv_cache(options);
}

std::unique_ptr<KVCache> pin(KVCacheManager& self, const Int32Arg& tokens, const ScopeArg& scope) {
  const auto view = tokens.get("kv.pin", "tokens");
  const ReuseScope reuse_scope = to_scope(scope);
  const nb::gil_scoped_release release;
  return self.pin(view, reuse_scope);
}

int32_t probe(const KVCacheManager& self, const Int32Arg& tokens, const ScopeArg& scope) {
  const auto view = tokens.get("kv.probe_reuse", "input_tokens");
  const ReuseScope reuse_scope = to_scope(scope);
  const nb::gil_scoped_release release;
  return self.probe_reuse(view, reuse_scope);
}

nb::typed<nb::list, bool> resize_many(KVCacheManager& self, const CacheListArg& caches,
                                      const Int32Arg& capacities,
                                      const std::optional<Int32Arg>& history_lengths) {
  const auto sizes = capacities.get("kv.resize_many", "capacities");
  const auto histories = history_lengths ? history_lengths->get("kv.resize_many", "history_lengths")
                                         : std::span<const int32_t>();
  HELICORE_CHECK(!history_lengths || histories.size() == caches.caches.size(), "kv.resize_many",
                 "history_lengths must be None or one per cache, got ", histories.size());
  std::vector<uint8_t> results(caches.caches.size());
  {
    const nb::gil_scoped_release release;
    self.resize_many(caches.caches, sizes, histories, results);
  }
  return to_bools(results);
}

void commit_many(KVCacheManager& self, const CacheListArg& caches, const Int32Arg& tokens,
                 const std::optional<Int32Arg>& counts) {
  const auto flat = tokens.get("kv.commit_many", "tokens");
  const auto per_cache =
      counts ? counts->get("kv.commit_many", "counts") : std::span<const int32_t>();
  HELICORE_CHECK(!counts || per_cache.size() == caches.caches.size(), "kv.commit_many",
                 "counts must be None or one per cache, got ", per_cache.size());
  const nb::gil_scoped_release release;
  self.commit_many(caches.caches, flat, per_cache);
}

void truncate_many(KVCacheManager& self, const CacheListArg& caches, const Int32Arg& num_tokens) {
  const auto lengths = num_tokens.get("kv.truncate_many", "num_tokens");
  const nb::gil_scoped_release release;
  self.truncate_many(caches.caches, lengths);
}

nb::typed<nb::list, bool> resume_many(KVCacheManager& self, const CacheListArg& caches,
                                      std::optional<int64_t> stream) {
  std::vector<uint8_t> results(caches.caches.size());
  {
    const nb::gil_scoped_release release;
    self.resume_many(caches.caches, stream, results);
  }
  return to_bools(results);
}

// [num_slots, bytes of one block] over pool memory; row s is the block in slot s.
PoolView pool_view(nb::handle_t<KVCacheManager> self, int32_t layer_id, const std::string& role) {
  const auto& manager = nb::cast<const KVCacheManager&>(self);
  if (manager.tier(kHotLevel) == CacheTier::kGpuMem) {
    throw NotSupported(
        "[kv.get_mem_pool_view] level 0 is GPU_MEM, which numpy can't view; use "
        "get_mem_pool_base_address");
  }
  const BufferAttr& buffer = manager.buffer_attr(layer_id, role);
  const auto descs = manager.pool_group_descs();
  const auto num_slots =
      static_cast<size_t>(descs[static_cast<size_t>(buffer.group.value())].num_slots);
  return PoolView(reinterpret_cast<uint8_t*>(
                      manager.mem_pool_base_address(layer_id, role, PageIndexMode::kShared)),
                  {num_slots, static_cast<size_t>(buffer.expanded_size)}, self,
                  {buffer.slot_bytes(), 1});
}

void bind_layout_queries(nb::class_<KVCacheManager>& cls) {
  using M = KVCacheManager;
  cls.def("get_mem_pool_base_address", &M::mem_pool_base_address, "layer_id"_a, "role"_a,
          "index_mode"_a = nb::none(),
          "Address that page indices of the buffer count from. None is SHARED; with "
          "config.swa_scratch_reuse the mode must be given.")
      .def("supports_index_mode", &M::supports_index_mode, "index_mode"_a,
           "None when it depends on the cache.")
      .def("get_mem_pool_view", &pool_view, "layer_id"_a, "role"_a,
           "Writable uint8 [num_slots, block bytes] over the pool; row s is the block in slot s.")
      .def("get_page_stride", &M::page_stride, "layer_id"_a, "role"_a,
           "Bytes of one kernel page; page index i starts at base + i * stride.")
      .def("get_page_index_scale", &M::page_index_scale, "layer_id"_a, "role"_a,
           "Base page index times this is the page index (times expansion, see the converter).")
      .def("get_page_index_upper_bound", &M::page_index_upper_bound, "layer_id"_a, "role"_a)
      .def("get_page_index_converter", &M::page_index_converter, "layer_id"_a, "role"_a)
      .def(
          "get_layer_group_id",
          [](const M& self, int32_t layer_id) { return self.layer_group_id(layer_id).value(); },
          "layer_id"_a)
      .def(
          "get_layer_group_domain",
          [](const M& self, int32_t group) { return self.life_cycle(LifeCycleId(group)).domain; },
          "group"_a)
      .def(
          "get_pool_group_of",
          [](const M& self, int32_t group) {
            return self.pool_group_of(LifeCycleId(group)).value();
          },
          "group"_a)
      .def_prop_ro("layer_grouping", &M::layer_grouping)
      .def_prop_ro("num_layer_groups", &M::num_layer_groups)
      .def_prop_ro("pool_group_descs", &M::pool_group_descs)
      .def_prop_ro("tokens_per_block", &M::tokens_per_block)
      .def_prop_ro("init_config", &M::init_config, nb::rv_policy::copy)
      .def("get_quota", &M::quota, "level"_a = kHotLevel, ReleaseGil(), "Bytes in effect.");
}

void bind_manager(nb::module_& m) {
  using M = KVCacheManager;
  nb::class_<M> cls(m, "KVCacheManager",
                    "Owns the pools, the pages and the radix tree of reusable blocks.");
  cls.def(
         "__init__", [](M* self, const KVCacheManagerConfig& config) { new (self) M(config); },
         "config"_a, ReleaseGil(),
         "Raises ValueError, NotSupportedError (naming the field) or MemoryError.")
      .def("create_kv_cache", &create, "reuse_scope"_a = nb::none(), "input_tokens"_a = nb::none(),
           "id"_a = nb::none(), nb::kw_only(), "priority"_a = kPriorityDefault,
           "expected_prompt_length"_a = nb::none(), "retention"_a = std::vector<RetentionRange>(),
           nb::keep_alive<0, 1>(),
           "A SUSPENDED cache that holds the longest cached prefix of input_tokens. `retention`: "
           "ranges that are worth more than `priority`, and for how long.")
      .def("pin", &pin, "tokens"_a, "reuse_scope"_a = nb::none(), nb::keep_alive<0, 1>(),
           "Keeps the longest cached prefix of the tokens, on whatever level, until the returned "
           "cache is closed or let go of. Counted in no statistics.")
      .def("make_step_stream", &M::make_step_stream, ReleaseGil(),
           "A stream for resume() that stands for steps which the device can't see: pages freed by "
           "its caches are used again once the steps submitted until then are complete.")
      .def("submit_step", &M::submit_step, "stream"_a, ReleaseGil(), "Its number, from 1.")
      .def("complete_step", &M::complete_step, "stream"_a, "step"_a, ReleaseGil(),
           "Steps up to this one are done.")
      .def("probe_reuse", &probe, "input_tokens"_a, "reuse_scope"_a = nb::none(),
           "Tokens that create_kv_cache would find now. Any thread.")
      .def("clear_reusable_blocks", &M::clear_reusable_blocks, ReleaseGil(),
           "Forget every cached prefix. Raises ResourceBusyError while caches are open.")
      .def("shutdown", &M::shutdown, ReleaseGil(),
           "Refuse further use. Raises ResourceBusyError while caches are open.")
      .def("resize_many", &resize_many, "caches"_a, "capacities"_a,
           "history_lengths"_a = nb::none(),
           "resize() for a whole step: one bool per cache, in order. A throw changes nothing.")
      .def("commit_many", &commit_many, "caches"_a, "tokens"_a, "counts"_a = nb::none(),
           "commit() for a whole step: counts[i] tokens each, concatenated; default one each.")
      .def("truncate_many", &truncate_many, "caches"_a, "num_tokens"_a,
           "truncate() for a whole step, one length per cache. A throw changes nothing.")
      .def("resume_many", &resume_many, "caches"_a, "stream"_a = nb::none(),
           "resume() for several caches: one bool per cache, in order.")
      .def("get_storage_statistics", &M::storage_statistics, "level"_a = kHotLevel, ReleaseGil(),
           "One entry per pool group: total, free and evictable slots.")
      .def("get_stats", &M::stats, ReleaseGil())
      .def("get_layer_group_stats", &M::life_cycle_stats, ReleaseGil(),
           "Counters of pages, one entry per layer group, since the manager was made.")
      .def(
          "get_migration_stats",
          [](const M& self) {
            std::vector<std::vector<MigrationCounters>> levels;
            for (const auto& level : self.migration_stats().levels) levels.push_back(level.raw());
            return levels;
          },
          ReleaseGil(), "[level][layer group] counters since the manager was made.")
      .def_prop_ro("num_levels", &M::num_levels)
      .def("get_tier", &M::tier, "level"_a)
      .def(
          "drain_events",
          [](M& self, std::optional<size_t> max_events) {
            const nb::gil_scoped_release release;
            return self.drain_events(max_events.value_or(SIZE_MAX));
          },
          "max_events"_a = nb::none(),
          "The oldest recorded changes of the tree of reusable blocks; they leave the buffer "
          "(config.event_buffer_size). When it overflows the oldest are dropped: see "
          "num_dropped_events and snapshot_events.")
      .def("snapshot_events", &M::snapshot_events, ReleaseGil(),
           "CREATED and STORED events that make the tree as it is, parents first, all with the id "
           "that the next event will have; empties the buffer.")
      .def_prop_ro("num_dropped_events", &M::num_dropped_events, ReleaseGil())
      .def(
          "get_chain_keys",
          [](const M& self, const Int32Arg& tokens, const ScopeArg& scope) {
            return to_bytes(
                self.chain_keys(tokens.get("kv.get_chain_keys", "tokens"), to_scope(scope)));
          },
          "tokens"_a, "reuse_scope"_a = nb::none(),
          "SHA-256 chain keys (32 bytes) of the full blocks of `tokens`.")
      .def_prop_ro("num_open_caches", &M::num_open_caches, ReleaseGil())
      .def_prop_ro("num_available_blocks", &M::num_available_blocks, ReleaseGil(),
                   "Blocks that could be had now, evicting what nobody holds.")
      .def_prop_ro("num_total_blocks", &M::num_total_blocks, ReleaseGil(),
                   "Blocks that fit when nothing else is there.");
  bind_layout_queries(cls);
  bind_recording_methods(cls);
  bind_sizing_methods(cls);
}

}  // namespace

void bind_kv_manager(nb::module_& m) { bind_manager(m); }

}  // namespace helicore::bindings
