// Python semantics of C++ value types: repr from the named fields, equality by value, hash by repr.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

namespace helicore::bindings {

inline std::string repr_of(nanobind::handle self, const std::string& name,
                           const std::vector<const char*>& fields) {
  std::string text = name + "(";
  for (size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) text += ", ";
    text += fields[i];
    text += "=";
    text += nanobind::cast<std::string>(nanobind::repr(self.attr(fields[i])));
  }
  return text + ")";
}

template <typename T>
void add_value_semantics(nanobind::class_<T>& cls, std::string name,
                         std::vector<const char*> fields) {
  namespace nb = nanobind;
  cls.def("__repr__", [name, fields](nb::handle_t<T> self) { return repr_of(self, name, fields); });
  cls.def("__hash__", [name, fields](nb::handle_t<T> self) {
    return nb::hash(nb::str(repr_of(self, name, fields).c_str()));
  });
  cls.def(
      "__eq__",
      [](const T& self, nb::object other) {
        return nb::isinstance<T>(other) && self == *nb::inst_ptr<T>(other);
      },
      nb::arg("other"));
}

// Registers `__init__` as construct, validate, move: a bad value raises and leaves nothing behind.
template <typename T>
void construct_checked(T* self, T value) {
  value.validate();
  new (self) T(std::move(value));
}

}  // namespace helicore::bindings
