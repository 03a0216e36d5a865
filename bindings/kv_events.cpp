// helicore._core.kv: events of the reuse tree.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "helicore/kv/event_log.h"
#include "kv_values.h"

namespace nb = nanobind;

namespace helicore::bindings {
namespace {

using kv::KVEvent;

nb::bytes to_bytes(const kv::Digest& key) {
  return nb::bytes(reinterpret_cast<const char*>(key.data()), key.size());
}

}  // namespace

void bind_kv_events(nb::module_& m) {
  nb::enum_<kv::EventKind>(m, "EventKind", "What a KVEvent tells.")
      .value("CREATED", kv::EventKind::kCreated, "A scope's root appeared: key, reuse_scope.")
      .value("STORED", kv::EventKind::kStored,
             "A block became reusable: key, parent_key, ordinal, priority, tokens.")
      .value("REMOVED", kv::EventKind::kRemoved, "A block or a root is gone: key.")
      .value("UPDATED", kv::EventKind::kUpdated, "A block's priority rose: key, priority.");
  nb::class_<KVEvent> event(m, "KVEvent",
                            "One change of the tree of reusable blocks. Fields that the kind does "
                            "not name are None, empty, -1 or 0.");
  event.def_ro("id", &KVEvent::id, "Consecutive from 0; a gap tells that events were dropped.")
      .def_ro("kind", &KVEvent::kind)
      .def_prop_ro(
          "key", [](const KVEvent& self) { return to_bytes(self.key); },
          "The 32-byte chain key, as get_chain_keys and get_root_key give it.")
      .def_prop_ro("parent_key",
                   [](const KVEvent& self) -> std::optional<nb::bytes> {
                     if (self.kind != kv::EventKind::kStored) return std::nullopt;
                     return to_bytes(self.parent_key);
                   })
      .def_ro("ordinal", &KVEvent::ordinal)
      .def_ro("priority", &KVEvent::priority)
      .def_ro("tokens", &KVEvent::tokens)
      .def_ro("reuse_scope", &KVEvent::scope)
      .def_prop_ro(
          "layer_group",
          [](const KVEvent& self) -> std::optional<int32_t> {
            if (self.life_cycle == KVEvent::kWholeBlock) return std::nullopt;
            return self.life_cycle;
          },
          "The one layer group whose page came or went; None: the whole block.")
      .def_ro("num_tokens", &KVEvent::num_tokens,
              "Tokens of the block that the page of layer_group covers.")
      .def_ro("layer_groups", &KVEvent::life_cycles,
              "Groups whose pages cover every token of a stored block, ascending.");
  add_value_semantics(event, "KVEvent",
                      {"id", "kind", "key", "parent_key", "ordinal", "priority", "tokens",
                       "reuse_scope", "layer_group", "num_tokens", "layer_groups"});
}

}  // namespace helicore::bindings
