#include "helicore/kv/config_text.h"

#include <charconv>
#include <concepts>
#include <functional>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr const char* kWhere = "kv.config_from_text";

// The fields of each type, listed once for both directions. The bindings stop compiling when a type
// gains a field: list it here too.
template <typename A>
void visit(A& a, GpuCacheTierConfig& c) {
  auto& [quota] = c;
  a("quota", quota);
}
template <typename A>
void visit(A& a, HostCacheTierConfig& c) {
  auto& [quota] = c;
  a("quota", quota);
}
template <typename A>
void visit(A& a, DiskCacheTierConfig& c) {
  auto& [quota, path] = c;
  a("quota", quota);
  a("path", path);
}
template <typename A>
void visit(A& a, BufferConfig& c) {
  auto& [role, size, tokens_per_block_override] = c;
  a("role", role);
  a("size", size);
  a("tokens_per_block_override", tokens_per_block_override);
}
template <typename A>
void visit(A& a, AttentionLayerConfig& c) {
  auto& [layer_id, buffers, window, sinks, domain, policy] = c;
  a("layer_id", layer_id);
  a("buffers", buffers);
  a("sliding_window_size", window);
  a("num_sink_tokens", sinks);
  a("cache_domain", domain);
  a("reuse_policy", policy);
}
template <typename A>
void visit(A& a, SsmLayerConfig& c) {
  auto& [layer_id, buffers] = c;
  a("layer_id", layer_id);
  a("buffers", buffers);
}
template <typename A>
void visit(A& a, KVCacheDesc& c) {
  auto& [capacity, history_length] = c;
  a("capacity", capacity);
  a("history_length", history_length);
}
template <typename A>
void visit(A& a, BatchDesc& c) {
  auto& [kv_caches, system_prompt_length] = c;
  a("kv_caches", kv_caches);
  a("system_prompt_length", system_prompt_length);
}
template <typename A>
void visit(A& a, SwaScratchReuseConfig& c) {
  auto& [max_rewind_len] = c;
  a("max_rewind_len", max_rewind_len);
}
template <typename A>
void visit(A& a, KVCacheManagerConfig& c) {
  auto& [tokens_per_block, cache_tiers, layers, max_util, partial, backoff, draft_backoff,
         constraints, typical_step, ratio, scratch, min_snapshot, stats, text_only, min_sampled,
         cooldown, interval, threshold, decay, device_index, events] = c;
  a("tokens_per_block", tokens_per_block);
  a("cache_tiers", cache_tiers);
  a("layers", layers);
  a("max_util_for_resume", max_util);
  a("enable_partial_reuse", partial);
  a("reuse_match_backoff", backoff);
  a("draft_reuse_match_backoff", draft_backoff);
  a("constraints", constraints);
  a("typical_step", typical_step);
  a("initial_pool_ratio", ratio);
  a("swa_scratch_reuse", scratch);
  a("commit_min_snapshot", min_snapshot);
  a("enable_stats", stats);
  a("text_only", text_only);
  a("rebalance_min_sampled_kv_caches", min_sampled);
  a("rebalance_cooldown_secs", cooldown);
  a("rebalance_target_ratio_update_interval", interval);
  a("rebalance_ratio_threshold", threshold);
  a("rebalance_moving_average_decay", decay);
  a("device_index", device_index);
  a("event_buffer_size", events);
}

// Printable, one line: everything else and the backslash become \xx.
std::string escape(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '\\') {
      out.push_back(c);
    } else {
      out += {'\\', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

std::optional<std::string> unescape(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      out.push_back(text[i]);
      continue;
    }
    unsigned value = 0;
    if (i + 2 >= text.size()) return std::nullopt;
    const auto end = text.data() + i + 3;
    if (std::from_chars(text.data() + i + 1, end, value, 16).ptr != end) return std::nullopt;
    out.push_back(static_cast<char>(value));
    i += 2;
  }
  return out;
}

template <typename T>
concept Number = std::integral<T> || std::floating_point<T>;

class Writer {
 public:
  std::string text;

  template <typename T>
  void operator()(std::string_view name, T& value) {
    const std::string outer = prefix_;
    prefix_ += prefix_.empty() ? "" : ".";
    prefix_ += name;
    put(value);
    prefix_ = outer;
  }

 private:
  void line(std::string_view value) {
    text += prefix_;
    text += " = ";
    text += value;
    text += '\n';
  }
  void put(bool& value) { line(value ? "1" : "0"); }
  template <Number T>
  void put(T& value) {
    char digits[64];
    line({digits, std::to_chars(digits, digits + sizeof digits, value).ptr});
  }
  template <typename T>
    requires std::is_enum_v<T>
  void put(T& value) {
    auto number = static_cast<int>(value);
    put(number);
  }
  void put(std::string& value) { line(escape(value)); }
  template <typename T>
  void put(std::optional<T>& value) {
    if (value) put(*value);
    if (!value) line("none");
  }
  template <typename T>
  void put(std::vector<T>& values) {
    auto count = values.size();
    (*this)("count", count);
    for (size_t i = 0; i < values.size(); ++i) (*this)(std::to_string(i), values[i]);
  }
  template <typename... T>
  void put(std::variant<T...>& value) {
    auto index = value.index();
    (*this)("kind", index);
    std::visit([this](auto& held) { visit(*this, held); }, value);
  }
  template <typename T>
    requires std::is_class_v<T>
  void put(T& value) {
    visit(*this, value);
  }

  std::string prefix_;
};

class Reader {
 public:
  explicit Reader(std::string_view text) {
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.empty()) continue;
      const size_t at = line.find(" = ");
      HELICORE_CHECK(at != std::string_view::npos, kWhere, "lines must be 'name = value', got '",
                     line, "'");
      lines_[std::string(line.substr(0, at))] = {std::string(line.substr(at + 3)), false};
    }
  }

  template <typename T>
  void operator()(std::string_view name, T& value) {
    const std::string outer = prefix_;
    prefix_ += prefix_.empty() ? "" : ".";
    prefix_ += name;
    take(value);
    prefix_ = outer;
  }

  void check_all_used() const {
    for (const auto& [name, line] : lines_) {
      if (line.is_used) continue;
      throw NotSupported(
          detail::concat("[", kWhere, "] this build has no field '", name, "'; a later one does"));
    }
  }

 private:
  struct Line {
    std::string value;
    bool is_used = false;
  };

  // The value of the current name; null when the text has none.
  const std::string* find() {
    const auto it = lines_.find(prefix_);
    if (it == lines_.end()) return nullptr;
    it->second.is_used = true;
    return &it->second.value;
  }
  bool has_any() const {  // the current name or one below it
    const auto it = lines_.lower_bound(prefix_);
    return it != lines_.end() && it->first.starts_with(prefix_);
  }
  [[noreturn]] void refuse(const std::string& value, const char* allowed) const {
    throw InvalidArgument(
        detail::concat("[", kWhere, "] ", prefix_, " must be ", allowed, ", got '", value, "'"));
  }

  void take(bool& value) {
    auto number = static_cast<int>(value);
    take(number);
    value = number != 0;
  }
  template <Number T>
  void take(T& value) {
    const std::string* text = find();
    if (text == nullptr) return;
    const char* end = text->data() + text->size();
    const auto [ptr, error] = std::from_chars(text->data(), end, value);
    if (error != std::errc() || ptr != end || text->empty()) refuse(*text, "a number in range");
  }
  template <typename T>
    requires std::is_enum_v<T>
  void take(T& value) {
    auto number = static_cast<int>(value);
    take(number);
    value = static_cast<T>(number);
  }
  void take(std::string& value) {
    const std::string* text = find();
    if (text == nullptr) return;
    auto plain = unescape(*text);
    if (!plain) refuse(*text, "text with \\xx escapes");
    value = std::move(*plain);
  }
  template <typename T>
  void take(std::optional<T>& value) {
    if (!has_any()) return;
    const auto it = lines_.find(prefix_);
    if (it != lines_.end() && it->second.value == "none") {
      it->second.is_used = true;
      value.reset();
      return;
    }
    T held{};
    take(held);
    value = std::move(held);
  }
  template <typename T>
  void take(std::vector<T>& values) {
    size_t count = values.size();
    (*this)("count", count);
    if (count > lines_.size()) refuse(std::to_string(count), "a list with a line per entry");
    values.resize(count);
    for (size_t i = 0; i < count; ++i) (*this)(std::to_string(i), values[i]);
  }
  template <typename... T>
  void take(std::variant<T...>& value) {
    size_t index = value.index();
    (*this)("kind", index);
    if (index >= sizeof...(T)) refuse(std::to_string(index), "a known kind");
    set_alternative<0, T...>(value, index);
    std::visit([this](auto& held) { visit(*this, held); }, value);
  }
  template <size_t I, typename... T>
  static void set_alternative(std::variant<T...>& value, size_t index) {
    if constexpr (I < sizeof...(T)) {
      if (index == I) {
        value.template emplace<I>();
      } else {
        set_alternative<I + 1, T...>(value, index);
      }
    }
  }
  template <typename T>
    requires std::is_class_v<T>
  void take(T& value) {
    visit(*this, value);
  }

  std::map<std::string, Line, std::less<>> lines_;
  std::string prefix_;
};

}  // namespace

std::string config_to_text(const KVCacheManagerConfig& config) {
  Writer writer;
  KVCacheManagerConfig copy = config;
  visit(writer, copy);
  return std::move(writer.text);
}

KVCacheManagerConfig config_from_text(std::string_view text) {
  Reader reader(text);
  KVCacheManagerConfig config;
  visit(reader, config);
  reader.check_all_used();
  return config;
}

}  // namespace helicore::kv
