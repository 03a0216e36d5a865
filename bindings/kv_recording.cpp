// helicore._core.kv: operation logs: recording, reading, replaying.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/operation_log.h"
#include "helicore/kv/operation_replay.h"
#include "kv_values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using namespace helicore::kv;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

RecordingOptions options_of(std::optional<std::string> path, int64_t max_bytes, int32_t state_every,
                            bool anonymise, bool write_ahead) {
  return {std::move(path).value_or(""), max_bytes, state_every, anonymise, write_ahead};
}

OperationLog parse(const nb::bytes& data) {
  const std::span bytes(static_cast<const std::byte*>(data.data()), data.size());
  const nb::gil_scoped_release release;
  return OperationLog::parse(bytes);
}

nb::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string operation_text(const OperationLog& log, int64_t index, size_t max_list) {
  HELICORE_CHECK(index >= 0 && static_cast<size_t>(index) < log.operations.size(),
                 "kv.OperationLog.describe", "index must be in [0, ", log.operations.size(),
                 "), got ", index);
  return describe(log.operations[static_cast<size_t>(index)], max_list);
}

ReplayReport replay(const OperationLog& log, int32_t check_every,
                    std::optional<KVCacheManagerConfig> config) {
  return Replayer(log, {check_every, std::move(config)}).run();
}

void bind_log(nb::module_& m) {
  nb::enum_<LogEnd>(m, "LogEnd", "How an operation log ends.")
      .value("COMPLETE", LogEnd::kComplete, "The recording was stopped, or its manager destroyed.")
      .value("OPEN", LogEnd::kOpen, "The writer went away between two operations.")
      .value("TORN", LogEnd::kTorn, "It went away while writing; the rest is sound.")
      .value("DAMAGED", LogEnd::kDamaged,
             "A record in the middle is damaged; what follows it is "
             "left out.");
  nb::class_<OperationLog>(m, "OperationLog",
                           "The calls on a manager, in the order in which they happened.")
      .def_static("load", &OperationLog::load, "path"_a, ReleaseGil(),
                  "Raises ValueError when the file is no log, NotSupportedError when another "
                  "version wrote it. Damage behind the header is told by `end`.")
      .def_static("parse", &parse, "data"_a, "The same for bytes.")
      .def_ro("config", &OperationLog::config, nb::rv_policy::copy)
      .def_ro("state_every", &OperationLog::state_every)
      .def_ro("is_anonymised", &OperationLog::is_anonymised)
      .def_ro("end", &OperationLog::end)
      .def_ro("problem", &OperationLog::problem,
              "Why the recording ended early, or what is damaged.")
      .def("__len__", [](const OperationLog& self) { return self.operations.size(); })
      .def("describe", &operation_text, "index"_a, "max_list"_a = 12,
           "An operation in words, with its results; lists are cut after max_list entries.");
}

void bind_replay(nb::module_& m) {
  nb::class_<ReplayDifference>(m, "ReplayDifference", "Where a replay first behaved otherwise.")
      .def_ro("index", &ReplayDifference::index)
      .def_ro("operation", &ReplayDifference::operation, "In words, with the recorded results.")
      .def_ro("what", &ReplayDifference::what);
  nb::class_<ReplayReport>(m, "ReplayReport", "What came of a replay.")
      .def_ro("num_replayed", &ReplayReport::num_replayed)
      .def_ro("num_operations", &ReplayReport::num_operations)
      .def_ro("end", &ReplayReport::end)
      .def_ro("difference", &ReplayReport::difference, nb::rv_policy::copy)
      .def_ro("note", &ReplayReport::note, "About the end of the log; empty when it is complete.")
      .def("__str__", [](const ReplayReport& self) { return describe(self); });
  m.def("replay_operations", &replay, "log"_a, nb::kw_only(), "check_every"_a = 64,
        "config"_a = nb::none(), ReleaseGil(),
        "Runs a log on a manager of its own, up to the first difference. Pages have no "
        "memory; every check_every-th operation is followed by a check of all "
        "invariants (0: none). `config` takes the place of the log's.");
}

}  // namespace

void bind_kv_recording(nb::module_& m) {
  nb::class_<RecordingSummary>(m, "RecordingSummary", "What a recording holds.")
      .def_ro("num_operations", &RecordingSummary::num_operations)
      .def_ro("num_bytes", &RecordingSummary::num_bytes)
      .def_ro("problem", &RecordingSummary::problem,
              "Why the recording ended early; empty: it did not.")
      .def_prop_ro(
          "data", [](const RecordingSummary& self) { return to_bytes(self.bytes); },
          "The log, when it was recorded in memory.");
  bind_log(m);
  bind_replay(m);
}

void bind_recording_methods(nb::class_<KVCacheManager>& cls) {
  cls.def(
         "start_recording",
         [](KVCacheManager& self, std::optional<std::string> path, int64_t max_bytes,
            int32_t state_every, bool anonymise, bool write_ahead) {
           const auto options =
               options_of(std::move(path), max_bytes, state_every, anonymise, write_ahead);
           const nb::gil_scoped_release release;
           self.start_recording(options);
         },
         "path"_a = nb::none(), nb::kw_only(), "max_bytes"_a = int64_t{1} << 30,
         "state_every"_a = 64, "anonymise"_a = false, "write_ahead"_a = false,
         "Write every call from now on to an operation log: a file, or memory without a path. "
         "Begins before the first cache.\n\n"
         "max_bytes: where the recording ends. state_every: every n-th operation a digest of the "
         "whole state (0: never). anonymise: tokens, salts, ids and streams become numbers in the "
         "order of their appearance. write_ahead: a call is in the file before it runs.")
      .def("stop_recording", &KVCacheManager::stop_recording, ReleaseGil(),
           "Raises LogicError when no recording is running.")
      .def_prop_ro("is_recording", &KVCacheManager::is_recording);
}

}  // namespace helicore::bindings
