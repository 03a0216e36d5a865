// helicore._core.kv: sizes of levels that change while sequences run, and
// forecasts of room.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
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
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

void bind_resize_result(nb::module_& m) {
  nb::class_<ResizeResult> result(m, "ResizeResult", "What became of a resize of a level.");
  result.def_ro("done", &ResizeResult::done, "Every pool group has the slots of the new quota.")
      .def_ro("quota", &ResizeResult::quota,
              "Bytes in effect: the old ones until the memory is back.")
      .def_ro("minimum", &ResizeResult::minimum, "Bytes: the least that the level can have.")
      .def_prop_ro(
          "slots", [](const ResizeResult& self) { return self.slots.raw(); },
          "That each pool group hands out now.")
      .def_prop_ro(
          "pending", [](const ResizeResult& self) { return self.pending.raw(); },
          "Slots still to be given back (> 0) or to be had (< 0), per pool group.")
      .def_ro("reason", &ResizeResult::reason, nb::rv_policy::copy,
              "What is in the way; None when it is only time.")
      .def("__bool__", [](const ResizeResult& self) { return self.done; })
      .def("__repr__", [](nb::handle_t<ResizeResult> self) {
        return repr_of(self, "ResizeResult",
                       {"done", "quota", "minimum", "slots", "pending", "reason"});
      });
}

void bind_plans(nb::module_& m) {
  nb::class_<SequencePlan> plan(m, "SequencePlan", "How far a sequence will go, in tokens.");
  plan.def(
          "__init__",
          [](SequencePlan* self, int32_t capacity, int32_t history_length, int32_t final_capacity,
             int32_t tokens_per_step, int32_t lookahead, int32_t shared_blocks) {
            new (self) SequencePlan{.capacity = capacity,
                                    .history_length = history_length,
                                    .final_capacity = final_capacity,
                                    .tokens_per_step = tokens_per_step,
                                    .lookahead = lookahead,
                                    .shared_blocks = shared_blocks};
          },
          "capacity"_a, "history_length"_a, "final_capacity"_a, nb::kw_only(),
          "tokens_per_step"_a = 1, "lookahead"_a = 0, "shared_blocks"_a = 0)
      .def_static("of_request", &plan_of_request, "prompt_length"_a, "output_tokens"_a,
                  "reused_blocks"_a, "tokens_per_block"_a,
                  "Slots for the prompt at its first step, then output_tokens - 1 steps. "
                  "reused_blocks: blocks of the prompt that running sequences hold.")
      .def_ro("capacity", &SequencePlan::capacity, "Of the step at hand.")
      .def_ro("history_length", &SequencePlan::history_length, "Of the step at hand.")
      .def_ro("final_capacity", &SequencePlan::final_capacity, "Of the last step.")
      .def_ro("tokens_per_step", &SequencePlan::tokens_per_step)
      .def_ro("lookahead", &SequencePlan::lookahead,
              "Tokens at the end of capacity that never become history.")
      .def_ro("shared_blocks", &SequencePlan::shared_blocks,
              "Blocks from the start that others hold as well.");
  nb::class_<AdmissionForecast> forecast(m, "AdmissionForecast", "When a request fits.");
  forecast.def_ro("fits_now", &AdmissionForecast::fits_now)
      .def_ro("steps_until_fits", &AdmissionForecast::steps_until_fits,
              "Until it can run to its end without preempting anyone; None: never.")
      .def_prop_ro(
          "limiting_pool_group",
          [](const AdmissionForecast& self) { return self.limiting_group.value(); },
          "The one that is short for longest, or has the fewest slots to spare.")
      .def_ro("peak_needed", &AdmissionForecast::peak_needed,
              "Slots of that group: the most that the request holds.");
  add_value_semantics(forecast, "AdmissionForecast",
                      {"fits_now", "steps_until_fits", "limiting_pool_group", "peak_needed"});
}

AdmissionForecast forecast_admission(const KVCacheManager& self, const CacheListArg& running,
                                     const Int32Arg& final_capacities, const SequencePlan& request,
                                     int32_t tokens_per_step, int32_t lookahead) {
  const auto lengths = final_capacities.get("kv.forecast_admission", "final_capacities");
  HELICORE_CHECK(lengths.size() == running.caches.size(), "kv.forecast_admission",
                 "final_capacities must be one per cache, got ", lengths.size());
  std::vector<ExpectedLength> expected;
  for (size_t i = 0; i < lengths.size(); ++i) {
    expected.push_back({running.caches[i], lengths[i], tokens_per_step, lookahead});
  }
  const nb::gil_scoped_release release;
  return self.forecast_admission(expected, request);
}

}  // namespace

void bind_kv_sizing(nb::module_& m) {
  bind_resize_result(m);
  bind_plans(m);
}

void bind_sizing_methods(nb::class_<KVCacheManager>& cls) {
  using M = KVCacheManager;
  cls.def("resize", &M::resize, "level"_a, "quota"_a, "best_effort"_a = false, ReleaseGil(),
          "Take a level to `quota` bytes, rounded up, while sequences run; no address changes. "
          "Shrinking changes nothing when pages are in the way (reason); with best_effort it "
          "returns at once and maintain() goes on.\n\nRaises ValueError for a quota out of range, "
          "MemoryError when it can't grow.")
      .def("maintain", &M::maintain, "max_pages"_a, ReleaseGil(),
           "Between steps: work on levels that are on their way to other sizes, at most max_pages "
           "pages; how many moved.")
      .def_prop_ro("is_resizing", &M::is_resizing, "maintain() has something to do.")
      .def_prop_ro("need_adjustment", &M::need_adjustment, ReleaseGil(),
                   "The lengths of closed sequences ask for other shares of the pool groups.")
      .def("adjust", &M::adjust, ReleaseGil(),
           "Start to move memory between pool groups; maintain() goes on. False: nothing to do.")
      .def("get_pool_ratios", &M::pool_ratios, "level"_a = kHotLevel, ReleaseGil(),
           "Share of the level's bytes per pool group.")
      .def("get_target_ratios", &M::target_ratios, "level"_a = kHotLevel, ReleaseGil(),
           "What the traffic asks for; None before the first were learnt.")
      .def("mark_stats_excluded", &M::mark_stats_excluded, "id"_a, ReleaseGil(),
           "Caches of this id count for nothing in adjust().")
      .def("is_stats_excluded", &M::is_stats_excluded, "id"_a, ReleaseGil())
      .def("clamp_max_seq_len_for_mem", &M::clamp_max_seq_len_for_mem, "batch_size"_a, "upper"_a,
           ReleaseGil(),
           "The most tokens, <= upper, that one sequence can have next to batch_size - 1 of one "
           "token.")
      .def("forecast_admission", &forecast_admission, "running"_a, "final_capacities"_a,
           "request"_a, "tokens_per_step"_a = 1, "lookahead"_a = 0,
           "When a request can run to its end without preempting anyone. `running`: active caches "
           "and the capacity that each will end with; others keep what they have.");
}

}  // namespace helicore::bindings
