// A manager's configuration as lines of text, "layers.0.buffers.1.size = 4096", and back: what
// operation logs carry. One line per scalar; what an older text does not name keeps its default.
#pragma once

#include <string>
#include <string_view>

#include "helicore/kv/config.h"

namespace helicore::kv {

// Every field, in the order of declaration. Floating point numbers come back exactly.
[[nodiscard]] std::string config_to_text(const KVCacheManagerConfig& config);

// The configuration of a text; not validated. Throws InvalidArgument naming a line that is not
// "name = value" or a value that is not of its field's type, and NotSupported naming a field that
// this build does not have.
[[nodiscard]] KVCacheManagerConfig config_from_text(std::string_view text);

}  // namespace helicore::kv
