// Strong index types: a layer, a pool group, a slot and a page can't be mixed up.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <utility>
#include <vector>

namespace helicore {

// An integer with a tag. Explicit construction; compares and increments, no arithmetic between
// tags.
template <typename Tag, typename Rep = int32_t>
class StrongIndex {
 public:
  using rep = Rep;
  constexpr StrongIndex() noexcept = default;
  constexpr explicit StrongIndex(Rep value) noexcept : value_(value) {}
  [[nodiscard]] constexpr Rep value() const noexcept { return value_; }
  constexpr StrongIndex& operator++() noexcept {
    ++value_;
    return *this;
  }
  friend constexpr auto operator<=>(const StrongIndex&, const StrongIndex&) = default;
  friend std::ostream& operator<<(std::ostream& out, const StrongIndex& index) {
    return out << index.value_;
  }

 private:
  Rep value_ = 0;
};

// A vector indexed by one strong index type.
template <typename Index, typename T>
class TypedVec {
 public:
  TypedVec() = default;
  explicit TypedVec(size_t size, const T& value = T()) : data_(size, value) {}
  [[nodiscard]] decltype(auto) operator[](Index i) { return data_[static_cast<size_t>(i.value())]; }
  [[nodiscard]] decltype(auto) operator[](Index i) const {
    return data_[static_cast<size_t>(i.value())];
  }
  [[nodiscard]] Index size() const noexcept {
    return Index(static_cast<typename Index::rep>(data_.size()));
  }
  [[nodiscard]] size_t count() const noexcept { return data_.size(); }
  [[nodiscard]] bool empty() const noexcept { return data_.empty(); }
  void push_back(T value) { data_.push_back(std::move(value)); }
  template <typename... Args>
  T& emplace_back(Args&&... args) {
    return data_.emplace_back(std::forward<Args>(args)...);
  }
  void resize(size_t size) { data_.resize(size); }
  auto begin() noexcept { return data_.begin(); }
  auto end() noexcept { return data_.end(); }
  auto begin() const noexcept { return data_.begin(); }
  auto end() const noexcept { return data_.end(); }
  [[nodiscard]] const std::vector<T>& raw() const noexcept { return data_; }
  [[nodiscard]] std::vector<T>& raw() noexcept { return data_; }

 private:
  std::vector<T> data_;
};

// [begin, end) over a strong index or an integer; empty ranges are normalised by `empty()`.
template <typename Index>
struct HalfOpenRange {
  Index begin{};
  Index end{};
  [[nodiscard]] constexpr bool empty() const noexcept { return !(begin < end); }
  [[nodiscard]] constexpr bool contains(Index i) const noexcept { return begin <= i && i < end; }
  friend constexpr bool operator==(const HalfOpenRange&, const HalfOpenRange&) = default;
};

}  // namespace helicore

template <typename Tag, typename Rep>
struct std::hash<helicore::StrongIndex<Tag, Rep>> {
  size_t operator()(const helicore::StrongIndex<Tag, Rep>& i) const noexcept {
    return std::hash<Rep>{}(i.value());
  }
};
