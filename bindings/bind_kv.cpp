// helicore._core.kv: the KV cache manager and its caches. Values live in kv_config.cpp and
// kv_layout.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "helicore/kv/errors.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv_casters.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {

void bind_kv_config(nb::module_& m);
void bind_kv_events(nb::module_& m);
void bind_kv_layout(nb::module_& m);
void bind_kv_recording(nb::module_& m);
void bind_recording_methods(nb::class_<kv::KVCacheManager>& cls);
void bind_kv_store(nb::module_& m);

namespace {

using namespace helicore::kv;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using ScopeArg = std::variant<std::monostate, int64_t, ReuseScope>;
using IndexView = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>, nb::device::cpu>;
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

void bind_errors(nb::module_& m) {
  nb::exception<LogicError>(m, "LogicError", PyExc_RuntimeError);
  nb::exception<ResourceBusy>(m, "ResourceBusyError", PyExc_RuntimeError);
  nb::exception<DataLost>(m, "DataLostError", PyExc_RuntimeError);
  // OutOfPagesError carries the reason; the class lives as long as the interpreter.
  static PyObject* out_of_pages =
      PyErr_NewException("helicore._core.kv.OutOfPagesError", PyExc_RuntimeError, nullptr);
  m.attr("OutOfPagesError") = nb::borrow(out_of_pages);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfPages& e) {
      nb::object error = nb::borrow(out_of_pages)(e.what());
      error.attr("reason") = nb::cast(e.reason());
      PyErr_SetObject(out_of_pages, error.ptr());
    }
  });
}

void set_capacity(KVCache& cache, int64_t capacity) {
  if (!cache.resize(capacity)) throw OutOfPages(*cache.last_failure());
}

void set_history_length(KVCache& cache, int64_t history_length) {
  if (!cache.resize(std::nullopt, history_length)) throw OutOfPages(*cache.last_failure());
}

IndexView index_view(nb::handle_t<KVCache> self, int32_t group, int beam) {
  const auto indices = nb::cast<KVCache&>(self).base_page_indices(LifeCycleId(group), beam);
  static const int32_t nothing = kBadPageIndex;
  return IndexView(indices.empty() ? &nothing : indices.data(), {indices.size()}, self);
}

void set_index_row(KVCache& cache, int beam, int32_t group, const std::optional<Int32Row>& buf) {
  std::optional<std::span<int32_t>> row;
  if (buf) row = buf->get();
  cache.set_base_page_index_buf(beam, LifeCycleId(group), row);
}

// The child keeps the manager alive, not its parent, which may be closed and dropped first.
nb::typed<nb::object, KVCache> fork(KVCache& self, std::optional<int64_t> id) {
  std::unique_ptr<KVCache> child;
  {
    const nb::gil_scoped_release release;
    child = self.fork(id);
  }
  const nb::object manager = nb::find(*child->manager());
  nb::object result = nb::cast(std::move(child));
  nb::keep_alive_obj(result.ptr(), manager.ptr());
  return nb::typed<nb::object, KVCache>(std::move(result));
}

void bind_prefetch(nb::module_& m) {
  nb::class_<PrefetchTicket>(m, "PrefetchTicket", "Pages on their way to a hotter level.")
      .def("is_done", &PrefetchTicket::is_done, ReleaseGil(),
           "Nothing is left to do. Starts the next batch when one has arrived: poll it per step.")
      .def("cancel", &PrefetchTicket::cancel, "Start nothing more.")
      .def_prop_ro("is_complete", &PrefetchTicket::is_complete, "Every page arrived.");
}

void bind_cache(nb::module_& m) {
  nb::class_<KVCache> cls(m, "KVCache",
                          "The pages of one sequence; made by KVCacheManager.create_kv_cache().\n\n"
                          "SUSPENDED -> resume() -> ACTIVE -> suspend() -> SUSPENDED; close() from "
                          "both. One thread at a time may drive it.");
  cls.def("resume", &KVCache::resume, "stream"_a = nb::none(), ReleaseGil(),
          "Lock the pages and fill the page tables. False when there is no room (last_failure).")
      .def("prefetch", &KVCache::prefetch, "level"_a = kHotLevel, ReleaseGil(),
           nb::keep_alive<0, 1>(),
           "Bring the pages of a SUSPENDED cache up to `level` in the background; best effort.")
      .def("suspend", &KVCache::suspend, ReleaseGil(),
           "Unlock the pages but keep them; page tables read BAD_PAGE_INDEX.")
      .def("resize", &KVCache::resize, "capacity"_a.none(), "history_length"_a = nb::none(),
           ReleaseGil(),
           "Set the cursors, in tokens; None keeps one. False when there is no room: nothing "
           "changed.\n\nRaises ValueError when history would shrink or capacity < history.")
      .def("truncate", &KVCache::truncate, "num_tokens"_a, ReleaseGil(),
           "Rewind capacity and history to num_tokens, in [num_committed_tokens, capacity]; blocks "
           "past the end go at once. Needs no page.")
      .def("fork", &fork, "id"_a = nb::none(),
           "A SUSPENDED twin that shares every block before history_length; takes no page. Call "
           "resize() or resume() before writing rows: it copies what others share, or returns "
           "False when there is no room.")
      .def(
          "commit",
          [](KVCache& self, const Int32Arg& tokens, bool is_end) {
            const auto view = tokens.get("kv.commit", "tokens");
            const nb::gil_scoped_release release;
            self.commit(view, is_end);
          },
          "tokens"_a, "is_end"_a = false,
          "Declare the next tokens final; full blocks become reusable. Page tables may change.")
      .def("stop_committing", &KVCache::stop_committing, ReleaseGil(),
           "Publish the committed part of the last block; nothing may be committed afterwards.")
      .def("close", &KVCache::close, ReleaseGil(), "Give every page back. Idempotent.")
      .def("get_base_page_indices", &index_view, "group"_a = 0, "beam"_a = 0,
           "Zero-copy int32 slots of the blocks. Valid until the next resize, commit, suspend, "
           "set_base_page_index_buf or close of this cache.")
      .def("set_base_page_index_buf", &set_index_row, "beam"_a, "group"_a, "buf"_a.none(),
           nb::keep_alive<1, 4>(),
           "Keep the page table in `buf` (int32, contiguous) from now on; the rest is filled with "
           "BAD_PAGE_INDEX. None detaches. suspend() and close() detach too.")
      .def(
          "get_aggregated_page_indices",
          [](const KVCache& self, int32_t group, int beam, bool valid_only) {
            return self.aggregated_page_indices(LifeCycleId(group), beam, valid_only);
          },
          "group"_a, "beam"_a = 0, "valid_only"_a = false, "Slots of every block, active or not.");
  cls.def_prop_rw("capacity", &KVCache::capacity, &set_capacity,
                  "Tokens with storage. Setting it raises OutOfPagesError when there is no room.")
      .def_prop_rw("history_length", &KVCache::history_length, &set_history_length)
      .def_prop_rw("cuda_stream", &KVCache::stream, &KVCache::set_stream)
      .def_prop_ro("id", &KVCache::id)
      .def_prop_ro("status", &KVCache::status)
      .def_prop_ro("commit_state", &KVCache::commit_state)
      .def_prop_ro("is_active", &KVCache::is_active)
      .def_prop_ro("num_blocks", &KVCache::num_blocks)
      .def_prop_ro("tokens_per_block", &KVCache::tokens_per_block)
      .def_prop_ro("num_committed_tokens", &KVCache::num_committed_tokens)
      .def_prop_ro("num_reused_tokens", &KVCache::num_reused_tokens,
                   "Tokens that creation found in the cache.")
      .def_prop_ro("cached_tokens_by_level", &KVCache::cached_tokens_by_level,
                   "num_reused_tokens by the level of the coldest page of their block.")
      .def_prop_ro("is_lost", &KVCache::is_lost, "Pages were lost: the cache can only be closed.")
      .def_prop_ro("ssm_base_index", &KVCache::ssm_base_index, "Slot of the recurrent state.")
      .def_prop_ro("committed_tokens", &KVCache::committed_tokens)
      .def_prop_ro("beam_width", [](const KVCache&) { return 1; })
      .def_prop_ro("priority", &KVCache::priority)
      .def_prop_ro("reuse_scope", &KVCache::reuse_scope, nb::rv_policy::copy)
      .def_prop_ro("last_failure", &KVCache::last_failure, nb::rv_policy::copy,
                   "Why the last resume or resize returned False; None after a success.");
}

std::unique_ptr<KVCache> create(KVCacheManager& self, const ScopeArg& scope,
                                const std::optional<Int32Arg>& tokens, std::optional<int64_t> id,
                                int priority, std::optional<int64_t> expected_prompt_length) {
  const CreateOptions options{to_scope(scope), tokens_of(tokens, "kv.create_kv_cache"), id,
                              priority, expected_prompt_length};
  const nb::gil_scoped_release release;
  return self.create_kv_cache(options);
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
  const BufferAttr& buffer = manager.buffer_attr(layer_id, role);
  const auto descs = manager.pool_group_descs();
  const auto num_slots =
      static_cast<size_t>(descs[static_cast<size_t>(buffer.group.value())].num_slots);
  return PoolView(reinterpret_cast<uint8_t*>(manager.mem_pool_base_address(layer_id, role)),
                  {num_slots, static_cast<size_t>(buffer.expanded_size)}, self,
                  {buffer.slot_bytes(), 1});
}

void bind_layout_queries(nb::class_<KVCacheManager>& cls) {
  using M = KVCacheManager;
  cls.def("get_mem_pool_base_address", &M::mem_pool_base_address, "layer_id"_a, "role"_a,
          "index_mode"_a = PageIndexMode::kShared,
          "Address that page indices of the buffer count from.")
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
      .def("get_quota", &M::quota, "level"_a = kHotLevel, "Bytes in effect.");
}

void bind_manager(nb::module_& m) {
  using M = KVCacheManager;
  nb::class_<M> cls(m, "KVCacheManager",
                    "Owns the pools, the pages and the radix tree of reusable blocks.");
  cls.def(
         "__init__", [](M* self, const KVCacheManagerConfig& config) { new (self) M(config); },
         "config"_a, "Raises ValueError, NotSupportedError (naming the field) or MemoryError.")
      .def("create_kv_cache", &create, "reuse_scope"_a = nb::none(), "input_tokens"_a = nb::none(),
           "id"_a = nb::none(), nb::kw_only(), "priority"_a = kPriorityDefault,
           "expected_prompt_length"_a = nb::none(), nb::keep_alive<0, 1>(),
           "A SUSPENDED cache that holds the longest cached prefix of input_tokens.")
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
      .def_prop_ro("num_dropped_events", &M::num_dropped_events)
      .def(
          "get_chain_keys",
          [](const M& self, const Int32Arg& tokens, const ScopeArg& scope) {
            return to_bytes(
                self.chain_keys(tokens.get("kv.get_chain_keys", "tokens"), to_scope(scope)));
          },
          "tokens"_a, "reuse_scope"_a = nb::none(),
          "SHA-256 chain keys (32 bytes) of the full blocks of `tokens`.")
      .def_prop_ro("num_open_caches", &M::num_open_caches)
      .def_prop_ro("num_available_blocks", &M::num_available_blocks,
                   "Blocks that could be had now, evicting what nobody holds.")
      .def_prop_ro("num_total_blocks", &M::num_total_blocks,
                   "Blocks that fit when nothing else is there.");
  bind_layout_queries(cls);
  bind_recording_methods(cls);
}

}  // namespace

void bind_kv(nb::module_& m) {
  m.attr("BAD_PAGE_INDEX") = kBadPageIndex;
  m.attr("DEFAULT_BEAM_INDEX") = kDefaultBeamIndex;
  m.attr("GPU_LEVEL") = kHotLevel;
  m.attr("HOT_LEVEL") = kHotLevel;
  m.attr("PRIORITY_MIN") = kPriorityMin;
  m.attr("PRIORITY_MAX") = kPriorityMax;
  m.attr("PRIORITY_DEFAULT") = kPriorityDefault;
  bind_kv_config(m);
  bind_kv_layout(m);
  bind_kv_events(m);
  bind_kv_recording(m);
  bind_errors(m);
  bind_prefetch(m);
  bind_cache(m);
  bind_manager(m);
  bind_kv_store(m);
}

}  // namespace helicore::bindings
