#include "helicore/kv/operation.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <new>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/errors.h"

namespace helicore::kv {
namespace {

void put_varint(uint64_t value, std::vector<std::byte>& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<std::byte>(value | 0x80));
  out.push_back(static_cast<std::byte>(value));
}

std::optional<uint64_t> take_varint(std::span<const std::byte>& bytes) {
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 64 && !bytes.empty(); shift += 7) {
    const auto byte = static_cast<uint64_t>(bytes[0]);
    bytes = bytes.subspan(1);
    value |= (byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return std::nullopt;
}

uint64_t zigzag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}

int64_t unzigzag(uint64_t value) { return static_cast<int64_t>(value >> 1 ^ (~(value & 1) + 1)); }

std::string_view name_of(OperationOutcome outcome) {
  switch (outcome) {
    case OperationOutcome::kDone:
      return "done";
    case OperationOutcome::kNoRoom:
      return "no room";
    case OperationOutcome::kThrew:
      return "threw";
  }
  return "unknown";
}

std::string hex_text(uint64_t value) {
  std::array<char, 16> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return std::string("0x").append(digits.data(), end.ptr);
}

std::string values_text(const Operation::Entry& entry, size_t max_list) {
  const auto& values = entry.values;
  const int64_t first = values.empty() ? 0 : values[0];
  switch (entry.field) {
    case OperationField::kOutcome:
      return std::string(name_of(static_cast<OperationOutcome>(first)));
    case OperationField::kError:
      return std::string(name_of(static_cast<OperationError>(first)));
    case OperationField::kCounters:
    case OperationField::kState:
    case OperationField::kSizes:
      return hex_text(static_cast<uint64_t>(first));
    default:
      break;
  }
  if (values.size() == 1) return std::to_string(first);
  std::string text = "[";
  for (size_t i = 0; i < std::min(values.size(), max_list); ++i) {
    text += helicore::detail::concat(i > 0 ? ", " : "", values[i]);
  }
  if (values.size() > max_list) {
    text += helicore::detail::concat(", ... ", values.size(), " in all");
  }
  return text + ']';
}

}  // namespace

std::string_view name_of(OperationKind kind) noexcept {
  constexpr std::array<std::string_view, 35> kNames = {"unknown",
                                                       "create_kv_cache",
                                                       "resume",
                                                       "suspend",
                                                       "resize",
                                                       "truncate",
                                                       "fork",
                                                       "commit",
                                                       "stop_committing",
                                                       "close",
                                                       "set_base_page_index_buf",
                                                       "resume_many",
                                                       "resize_many",
                                                       "truncate_many",
                                                       "commit_many",
                                                       "clear_reusable_blocks",
                                                       "shutdown",
                                                       "pin",
                                                       "prefetch",
                                                       "PrefetchTicket.is_done",
                                                       "PrefetchTicket.cancel",
                                                       "plan_committed_block_drop",
                                                       "PlannedDrop.drop",
                                                       "make_step_stream",
                                                       "submit_step",
                                                       "complete_step",
                                                       "set_stream",
                                                       "KVCacheManager.resize",
                                                       "maintain",
                                                       "adjust",
                                                       "enable_swa_scratch_reuse",
                                                       "mark_stats_excluded",
                                                       "drain_events",
                                                       "snapshot_events",
                                                       "select_optional_reuse"};
  const auto at = static_cast<size_t>(kind);
  return kNames[at < kNames.size() ? at : 0];
}

std::string_view name_of(OperationField field) noexcept {
  constexpr std::array<std::string_view, 29> kArguments = {"unknown",
                                                           "cache",
                                                           "tokens",
                                                           "priority",
                                                           "id",
                                                           "expected_prompt_length",
                                                           "lora_id",
                                                           "lora_generation",
                                                           "salt_number",
                                                           "salt_text",
                                                           "stream",
                                                           "capacity",
                                                           "history_length",
                                                           "num_tokens",
                                                           "counts",
                                                           "is_end",
                                                           "group",
                                                           "beam",
                                                           "row_size",
                                                           "num_results",
                                                           "retention",
                                                           "level",
                                                           "plan",
                                                           "step",
                                                           "quota",
                                                           "best_effort",
                                                           "max_pages",
                                                           "is_enabled",
                                                           "max_events"};
  constexpr std::array<std::string_view, 28> kResults = {
      "outcome",   "error",     "results",    "reason",     "new_cache",  "matched", "counters",
      "state",     "new_plan",  "num_pages",  "new_stream", "new_step",   "times",   "lost",
      "held_back", "slots",     "had_memory", "gave_back",  "new_quota",  "minimum", "group_slots",
      "pending",   "num_moved", "started",    "num_events", "last_event", "sizes",   "num_dropped"};
  const auto at = static_cast<size_t>(field);
  if (at < kArguments.size()) return kArguments[at];
  const size_t result = at - static_cast<size_t>(OperationField::kOutcome);
  return result < kResults.size() ? kResults[result] : kArguments[0];
}

std::string_view name_of(OperationError error) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {
      "an exception", "InvalidArgument", "LogicError",    "ResourceBusy",
      "NotSupported", "OutOfMemory",     "InternalError", "OutOfPages"};
  const auto at = static_cast<size_t>(error);
  return kNames[at < kNames.size() ? at : 0];
}

OperationError current_error() noexcept {
  try {
    throw;
  } catch (const InvalidArgument&) {
    return OperationError::kInvalidArgument;
  } catch (const LogicError&) {
    return OperationError::kLogicError;
  } catch (const ResourceBusy&) {
    return OperationError::kResourceBusy;
  } catch (const NotSupported&) {
    return OperationError::kNotSupported;
  } catch (const OutOfMemory&) {
    return OperationError::kOutOfMemory;
  } catch (const std::bad_alloc&) {
    return OperationError::kOutOfMemory;
  } catch (const InternalError&) {
    return OperationError::kInternalError;
  } catch (const OutOfPages&) {
    return OperationError::kOutOfPages;
  } catch (...) {
    return OperationError::kOther;
  }
}

std::vector<int64_t>& Operation::list(OperationField field) {
  for (Entry& entry : entries) {
    if (entry.field == field) return entry.values;
  }
  return entries.emplace_back(Entry{field, {}}).values;
}

const std::vector<int64_t>* Operation::find(OperationField field) const noexcept {
  for (const Entry& entry : entries) {
    if (entry.field == field) return &entry.values;
  }
  return nullptr;
}

std::optional<int64_t> Operation::get(OperationField field) const noexcept {
  const auto* values = find(field);
  return values == nullptr || values->empty() ? std::nullopt : std::optional((*values)[0]);
}

void Operation::add_reason(const NoRoom& reason) {
  const int64_t values[] = {static_cast<int64_t>(reason.domain),
                            reason.pool_group.value(),
                            reason.level,
                            reason.needed,
                            reason.free,
                            reason.evictable,
                            reason.over_utilisation ? 1 : 0};
  auto& all = list(OperationField::kReason);
  all.insert(all.end(), std::begin(values), std::end(values));
}

void Operation::set_scope(const ReuseScope& scope) {
  set(OperationField::kLoraId, scope.lora_id);
  if (scope.lora_generation != 0) set(OperationField::kLoraGeneration, scope.lora_generation);
  if (const auto* number = std::get_if<int64_t>(&scope.salt)) {
    set(OperationField::kSaltNumber, *number);
  } else if (const auto* text = std::get_if<std::string>(&scope.salt)) {
    set_all(OperationField::kSaltText, std::span<const char>(*text));
  }
}

ReuseScope Operation::scope() const {
  ReuseScope scope;
  scope.lora_id = get(OperationField::kLoraId);
  scope.lora_generation = get(OperationField::kLoraGeneration).value_or(0);
  if (const auto number = get(OperationField::kSaltNumber)) {
    scope.salt = *number;
  } else if (const auto* text = find(OperationField::kSaltText)) {
    std::string salt;
    for (int64_t byte : *text) salt.push_back(static_cast<char>(byte));
    scope.salt = std::move(salt);
  }
  return scope;
}

void Operation::set_retention(std::span<const RetentionRange> ranges) {
  if (ranges.empty()) return;
  auto& all = list(OperationField::kRetention);
  for (const RetentionRange& range : ranges) {
    const int64_t values[] = {
        range.begin,    range.end ? 1 : 0,         range.end.value_or(0),
        range.priority, range.duration_ms ? 1 : 0, range.duration_ms.value_or(0)};
    all.insert(all.end(), std::begin(values), std::end(values));
  }
}

std::vector<RetentionRange> Operation::retention() const {
  std::vector<RetentionRange> ranges;
  const auto* values = find(OperationField::kRetention);
  for (size_t at = 0; values != nullptr && at + 6 <= values->size(); at += 6) {
    const int64_t* v = values->data() + at;
    RetentionRange range{.begin = static_cast<int32_t>(v[0]), .priority = static_cast<int>(v[3])};
    if (v[1] != 0) range.end = static_cast<int32_t>(v[2]);
    if (v[4] != 0) range.duration_ms = v[5];
    ranges.push_back(range);
  }
  return ranges;
}

std::string describe(const Operation& operation, size_t max_list) {
  std::string text = helicore::detail::concat(name_of(operation.kind), '(');
  for (const bool results : {false, true}) {
    bool first = true;
    for (const Operation::Entry& entry : operation.entries) {
      if (is_result(entry.field) != results) continue;
      if (results && first) text += ") -> ";
      if (!first) text += ", ";
      first = false;
      if (entry.field != OperationField::kOutcome) {
        text += helicore::detail::concat(name_of(entry.field), '=');
      }
      text += values_text(entry, max_list);
    }
    if (results && first) text += ") -> never returned";
  }
  return text;
}

void encode(const Operation& operation, std::vector<std::byte>& out) {
  out.push_back(static_cast<std::byte>(operation.kind));
  for (const Operation::Entry& entry : operation.entries) {
    out.push_back(static_cast<std::byte>(entry.field));
    put_varint(entry.values.size(), out);
    for (int64_t value : entry.values) put_varint(zigzag(value), out);
  }
}

std::optional<Operation> decode_operation(std::span<const std::byte> bytes) {
  if (bytes.empty()) return std::nullopt;
  Operation operation;
  operation.kind = static_cast<OperationKind>(bytes[0]);
  bytes = bytes.subspan(1);
  while (!bytes.empty()) {
    const auto field = static_cast<OperationField>(bytes[0]);
    bytes = bytes.subspan(1);
    const auto count = take_varint(bytes);
    // A value takes a byte at least: a count beyond them is no reason to allocate.
    if (!count || *count > bytes.size() || operation.find(field) != nullptr) return std::nullopt;
    auto& values = operation.list(field);
    values.reserve(*count);
    for (uint64_t i = 0; i < *count; ++i) {
      const auto value = take_varint(bytes);
      if (!value) return std::nullopt;
      values.push_back(unzigzag(*value));
    }
  }
  return operation;
}

}  // namespace helicore::kv
