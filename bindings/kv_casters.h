// Argument types of the KV bindings: int32 sequences without a copy where the memory allows it, and
// lists of caches.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <vector>

#include "casters.h"
#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"

namespace helicore::bindings {

// A list or tuple of ints (copied), or a contiguous one-dimensional int32 numpy array or CPU tensor
// (borrowed).
struct Int32Arg {
  using Array = nanobind::ndarray<const int32_t, nanobind::ndim<1>, nanobind::c_contig,
                                  nanobind::device::cpu>;
  std::vector<int32_t> owned;
  Array array;  // keeps borrowed memory alive
  std::span<const int32_t> borrowed;
  bool is_borrowed = false;
  bool out_of_range = false;

  [[nodiscard]] std::span<const int32_t> get(const char* where, const char* name) const {
    HELICORE_CHECK(!out_of_range, where, name, " must hold 32-bit integers");
    return is_borrowed ? borrowed : std::span<const int32_t>(owned);
  }

  bool load_sequence(PyObject* object, bool is_list) {
    const Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
    owned.resize(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (value == -1 && overflow == 0 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
      }
      out_of_range |= overflow != 0 || value < INT32_MIN || value > INT32_MAX;
      owned[static_cast<size_t>(i)] = static_cast<int32_t>(value);
    }
    return true;
  }

  bool load_tensor(PyObject* object) noexcept {
    TensorView view;
    if (!to_tensor_view(object, &view)) return false;
    if (view.dtype != DType::kInt32 || view.ndim != 1 || view.device.type != DeviceType::kCpu) {
      return false;
    }
    if (view.shape[0] > 1 && view.strides[0] != 1) return false;
    borrowed = {static_cast<const int32_t*>(view.data), static_cast<size_t>(view.shape[0])};
    is_borrowed = true;
    return true;
  }
};

// A contiguous one-dimensional int32 numpy array or CPU tensor that is written in place; never
// converted, for a converted copy would take the writes.
struct Int32Row {
  using Array =
      nanobind::ndarray<int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
  Int32Arg tensor;
  Array array;
  nanobind::object owner;  // the argument itself: who keeps the row keeps this

  [[nodiscard]] std::span<int32_t> get() const noexcept {
    if (!tensor.is_borrowed) return {array.data(), array.size()};
    return {const_cast<int32_t*>(tensor.borrowed.data()), tensor.borrowed.size()};
  }
};

// A list or tuple of KVCache objects.
struct CacheListArg {
  std::vector<kv::KVCache*> caches;
};

}  // namespace helicore::bindings

namespace nanobind::detail {

template <>
struct type_caster<helicore::bindings::Int32Arg> {
  NB_TYPE_CASTER(helicore::bindings::Int32Arg,
                 const_name("collections.abc.Sequence[int] | "
                            "numpy.typing.NDArray[numpy.int32] | torch.Tensor"))

  bool from_python(handle src, uint32_t, cleanup_list* cleanup) noexcept {
    try {
      PyObject* object = src.ptr();
      if (PyList_Check(object)) return value.load_sequence(object, true);
      if (PyTuple_Check(object)) return value.load_sequence(object, false);
      if (value.load_tensor(object)) return true;
      make_caster<helicore::bindings::Int32Arg::Array> caster;
      if (!caster.from_python(src, 0, cleanup)) return false;
      value.array = caster.value;
      value.borrowed = {value.array.data(), value.array.size()};
      value.is_borrowed = true;
      return true;
    } catch (...) {
      return false;
    }
  }
};

template <>
struct type_caster<helicore::bindings::Int32Row> {
  NB_TYPE_CASTER(helicore::bindings::Int32Row,
                 const_name("numpy.typing.NDArray[numpy.int32] | torch.Tensor"))

  bool from_python(handle src, uint32_t, cleanup_list* cleanup) noexcept {
    value.owner = borrow(src);
    if (value.tensor.load_tensor(src.ptr())) return true;
    make_caster<helicore::bindings::Int32Row::Array> caster;
    if (!caster.from_python(src, 0, cleanup)) return false;
    value.array = caster.value;
    return true;
  }
};

template <>
struct type_caster<helicore::bindings::CacheListArg> {
  NB_TYPE_CASTER(helicore::bindings::CacheListArg,
                 const_name("collections.abc.Sequence[helicore._core.kv.KVCache]"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    PyObject* object = src.ptr();
    const bool is_list = PyList_Check(object);
    if (!is_list && !PyTuple_Check(object)) return false;
    try {
      const Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
      value.caches.resize(static_cast<size_t>(size));
      PyTypeObject* known = nullptr;
      for (Py_ssize_t i = 0; i < size; ++i) {
        const handle item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
        if (Py_TYPE(item.ptr()) != known) {
          if (!isinstance<helicore::kv::KVCache>(item) || !inst_ready(item)) return false;
          known = Py_TYPE(item.ptr());
        }
        value.caches[static_cast<size_t>(i)] = inst_ptr<helicore::kv::KVCache>(item);
      }
      return true;
    } catch (...) {
      return false;
    }
  }
};

}  // namespace nanobind::detail
