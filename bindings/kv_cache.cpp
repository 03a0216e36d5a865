// helicore._core.kv: the cache of one sequence.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>
#include <utility>

#include "gil.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv_casters.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

// The caller-owned page table rows that caches write: one object per (beam, group), kept alive from
// set_base_page_index_buf() until it is replaced or let go. Guarded by the GIL, never destroyed.
class RowKeeper {
 public:
  using Rows = std::vector<std::pair<std::pair<int, int32_t>, nb::object>>;

  void keep(const kv::KVCache* cache, int beam, int32_t group, nb::object row) {
    const std::pair<int, int32_t> place{beam, group};
    Rows& rows = rows_[cache];
    for (auto& [other, kept] : rows) {
      if (other != place) continue;
      std::swap(kept, row);
      return;
    }
    rows.emplace_back(place, std::move(row));
  }
  // Every row of the cache, for the caller to drop once the cache has let go of the memory.
  [[nodiscard]] Rows take(const kv::KVCache* cache) {
    const auto found = rows_.find(cache);
    if (found == rows_.end()) return {};
    Rows rows = std::move(found->second);
    rows_.erase(found);
    return rows;
  }
  static RowKeeper& instance() {
    static auto* keeper = new RowKeeper;
    return *keeper;
  }

 private:
  std::unordered_map<const kv::KVCache*, Rows> rows_;
};

}  // namespace
}  // namespace helicore::bindings

// Both take the manager's lock.
template <>
void nanobind::detail::wrap_destruct<helicore::kv::KVCache>(void* value) noexcept {
  auto* cache = static_cast<helicore::kv::KVCache*>(value);
  const auto rows = helicore::bindings::RowKeeper::instance().take(cache);
  helicore::bindings::destroy_without_gil<helicore::kv::KVCache>(value);
}

template <>
void nanobind::detail::wrap_destruct<helicore::kv::PlannedDrop>(void* value) noexcept {
  helicore::bindings::destroy_without_gil<helicore::kv::PlannedDrop>(value);
}

namespace helicore::bindings {
namespace {

using namespace helicore::kv;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using IndexView = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>, nb::device::cpu>;

void set_capacity(KVCache& cache, int64_t capacity) {
  HELICORE_CHECK(!cache.scratch().is_enabled(), "kv.capacity",
                 "capacity can't be set alone with enable_swa_scratch_reuse; call "
                 "resize(capacity, history_length), got ",
                 capacity);
  const nb::gil_scoped_release release;
  if (!cache.resize(capacity)) throw OutOfPages(*cache.last_failure());
}

// Giving up the interpreter's lock and taking it again costs as much as most resizes.
bool resize(KVCache& cache, std::optional<int64_t> capacity, std::optional<int64_t> history) {
  if (const auto done = cache.try_resize(capacity, history)) return *done;
  const nb::gil_scoped_release release;
  return cache.resize(capacity, history);
}

void set_stream(KVCache& cache, int64_t stream) {
  const nb::gil_scoped_release release;
  cache.set_stream(stream);
}

void set_history_length(KVCache& cache, int64_t history_length) {
  const nb::gil_scoped_release release;
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
  {
    const nb::gil_scoped_release release;
    cache.set_base_page_index_buf(beam, LifeCycleId(group), row);
  }
  RowKeeper::instance().keep(&cache, beam, group, buf ? buf->owner : nb::none());
}

void suspend(KVCache& cache) {
  {
    const nb::gil_scoped_release release;
    cache.suspend();
  }
  const auto rows = RowKeeper::instance().take(&cache);
}

void close(KVCache& cache) {
  {
    const nb::gil_scoped_release release;
    cache.close();
  }
  const auto rows = RowKeeper::instance().take(&cache);
}

nb::typed<nb::object, KVCacheManager> manager_of(const KVCache& self) {
  return nb::typed<nb::object, KVCacheManager>(nb::find(*self.manager()));
}

// What a cache made keeps the manager alive, not the cache, which may be closed and dropped first.
template <typename T>
nb::typed<nb::object, T> with_manager(std::unique_ptr<T> made, KVCacheManager& manager) {
  const nb::object owner = nb::find(manager);
  nb::object result = nb::cast(std::move(made));
  nb::keep_alive_obj(result.ptr(), owner.ptr());
  return nb::typed<nb::object, T>(std::move(result));
}

nb::typed<nb::object, KVCache> fork(KVCache& self, std::optional<int64_t> id) {
  std::unique_ptr<KVCache> child;
  {
    const nb::gil_scoped_release release;
    child = self.fork(id);
  }
  return with_manager(std::move(child), *self.manager());
}

std::optional<nb::typed<nb::object, PlannedDrop>> plan_drop(KVCache& self) {
  std::unique_ptr<PlannedDrop> plan;
  {
    const nb::gil_scoped_release release;
    plan = self.plan_committed_block_drop();
  }
  if (plan == nullptr) return std::nullopt;
  return with_manager(std::move(plan), *self.manager());
}

void bind_planned_drop(nb::module_& m) {
  nb::class_<PlannedDrop>(m, "PlannedDrop",
                          "Pages that only the exact continuation of a sequence would reuse. They "
                          "go at drop(), or when this object does; the last of the plans that name "
                          "a page takes it.")
      .def("drop", &PlannedDrop::drop, ReleaseGil(), "Raises LogicError the second time.")
      .def_prop_ro("num_pages", &PlannedDrop::num_pages);
}

void bind_prefetch(nb::module_& m) {
  nb::class_<PrefetchTicket>(m, "PrefetchTicket", "Pages on their way to a hotter level.")
      .def("is_done", &PrefetchTicket::is_done, ReleaseGil(),
           "Nothing is left to do. Starts the next batch when one has arrived: poll it per step.")
      .def("cancel", &PrefetchTicket::cancel, "Start nothing more.")
      .def_prop_ro("is_complete", &PrefetchTicket::is_complete, "Every page arrived.");
}

std::vector<LifeCycleId> group_ids(const std::vector<int32_t>& groups) {
  std::vector<LifeCycleId> ids;
  for (int32_t group : groups) ids.emplace_back(group);
  return ids;
}

void bind_reuse(nb::module_& m) {
  nb::class_<ReuseStatus>(m, "ReuseStatus",
                          "What a cache has of a layer group. Of tokens that no later step reads "
                          "nothing is said.")
      .def_prop_ro("group_id", [](const ReuseStatus& self) { return self.group.value(); })
      .def_ro("policy", &ReuseStatus::policy)
      .def_ro("endpoint", &ReuseStatus::endpoint,
              "Tokens: where the last covered range ends; 0 without any.")
      .def_ro("complete", &ReuseStatus::complete,
              "The group has the rows of all tokens that later steps read.")
      .def_prop_ro(
          "coverage",
          [](const ReuseStatus& self) {
            std::vector<std::pair<int32_t, int32_t>> ranges;
            for (const TokenRange& range : self.coverage) {
              ranges.emplace_back(range.begin, range.end);
            }
            return ranges;
          },
          "Ranges [begin, end) of tokens whose rows it has, ascending.");
}

void bind_reuse_of(nb::class_<KVCache>& cls) {
  cls.def_prop_ro("reuse_status", &KVCache::reuse_status, ReleaseGil(),
                  "One ReuseStatus per layer group: what creation found, or, once OPTIONAL pages "
                  "were lost while SUSPENDED, what is there of the history.")
      .def(
          "select_optional_reuse",
          [](KVCache& self, const std::vector<int32_t>& groups) {
            self.select_optional_reuse(group_ids(groups));
          },
          "groups"_a, ReleaseGil(),
          "Before the first resume: OPTIONAL layer groups that are not named begin with empty "
          "pages.\n\nRaises ValueError for another group, LogicError after a resume.");
}

void bind_cache(nb::module_& m) {
  nb::class_<KVCache> cls(m, "KVCache",
                          "The pages of one sequence; made by KVCacheManager.create_kv_cache().\n\n"
                          "SUSPENDED -> resume() -> ACTIVE -> suspend() -> SUSPENDED; close() from "
                          "both. One thread at a time may drive it.");
  bind_reuse_of(cls);
  cls.def("resume", &KVCache::resume, "stream"_a = nb::none(), ReleaseGil(),
          "Lock the pages and fill the page tables. False when there is no room (last_failure).")
      .def("prefetch", &KVCache::prefetch, "level"_a = kHotLevel, ReleaseGil(),
           nb::keep_alive<0, 1>(),
           "Bring the pages of a SUSPENDED cache up to `level` in the background; best effort.")
      .def("suspend", &suspend, "Unlock the pages but keep them; page tables read BAD_PAGE_INDEX.")
      .def("resize", &resize, "capacity"_a.none(), "history_length"_a = nb::none(),
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
      .def("plan_committed_block_drop", &plan_drop,
           "A plan to drop what only this sequence's exact continuation would reuse: window pages "
           "at its end, its last snapshot. After stop_committing(); None when the committed tokens "
           "can't all be reused.")
      .def("close", &close, "Give every page back. Idempotent.")
      .def("get_base_page_indices", &index_view, "group"_a = 0, "beam"_a = 0,
           "Zero-copy int32 slots of the blocks. Valid until the next resize, commit, suspend, "
           "set_base_page_index_buf or close of this cache.")
      .def("set_base_page_index_buf", &set_index_row, "beam"_a, "group"_a, "buf"_a.none(),
           "Keep the page table in `buf` (int32, contiguous) from now on; the rest is filled with "
           "BAD_PAGE_INDEX. None detaches. suspend() and close() detach too.")
      .def(
          "get_aggregated_page_indices",
          [](const KVCache& self, int32_t group, int beam, bool valid_only) {
            return self.aggregated_page_indices(LifeCycleId(group), beam, valid_only);
          },
          "group"_a, "beam"_a = 0, "valid_only"_a = false, ReleaseGil(),
          "Slots of every block, active or not.");
  cls.def(
         "get_scratch_desc",
         [](const KVCache& self, int32_t group) { return self.scratch().desc(LifeCycleId(group)); },
         "group"_a = 0,
         "The scratch blocks of the step and their slots; None without any. Valid until the next "
         "call that sets capacity or history, suspends or closes.")
      .def(
          "supports_index_mode",
          [](const KVCache& self, PageIndexMode mode) { return self.scratch().supports(mode); },
          "index_mode"_a, "PER_LAYER always; SHARED unless enable_swa_scratch_reuse.")
      .def_prop_ro("has_scratch_slots",
                   [](const KVCache& self) { return self.scratch().has_slots(); })
      .def_prop_rw(
          "enable_swa_scratch_reuse",
          [](const KVCache& self) { return self.scratch().is_enabled(); },
          [](KVCache& self, bool value) {
            const nb::gil_scoped_release release;
            self.scratch().set_enabled(value);
          },
          "Whether blocks that no later step reads share slots. Can be set only where the step has "
          "no such blocks either way.");
  cls.def_prop_rw("capacity", &KVCache::capacity, &set_capacity,
                  "Tokens with storage. Setting it raises OutOfPagesError when there is no room.")
      .def_prop_rw("history_length", &KVCache::history_length, &set_history_length)
      .def_prop_rw("cuda_stream", &KVCache::stream, &set_stream,
                   "While ACTIVE, the new stream goes on after what the old one has by now.")
      .def_prop_ro("manager", &manager_of)
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
      .def_prop_ro("ssm_base_index", &KVCache::ssm_base_index, ReleaseGil(),
                   "Slot of the recurrent state.")
      .def_prop_ro("committed_tokens", &KVCache::committed_tokens, ReleaseGil())
      .def_prop_ro("beam_width", [](const KVCache&) { return 1; })
      .def_prop_ro("priority", &KVCache::priority)
      .def_prop_ro("reuse_scope", &KVCache::reuse_scope, nb::rv_policy::copy)
      .def_prop_ro("last_failure", &KVCache::last_failure, nb::rv_policy::copy,
                   "Why the last resume or resize returned False; None after a success.");
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_prefetch(m);
  bind_planned_drop(m);
  bind_reuse(m);
  bind_cache(m);
}

}  // namespace helicore::bindings
