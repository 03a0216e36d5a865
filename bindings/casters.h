// A strict caster from torch.Tensor to helicore::TensorView over torch's DLPack C exchange table.
//
// Zero-copy, no libtorch, no Python call: about 60 ns a tensor. Nothing is converted: a list, a
// numpy array or a meta tensor is a TypeError. The view is borrowed for the length of the call. A
// tensor that requires grad is accepted as data. `std::optional<TensorView>` accepts None.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>

#include "helicore/core/tensor_view.h"

namespace helicore::bindings {

// Head of DLPack's versioned exchange table (DLPack 1.3); only the entries that are used.
struct DlpackExchangeHeader {
  uint32_t major;
  uint32_t minor;
  DlpackExchangeHeader* previous;
};
struct DlpackExchangeApi {
  DlpackExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, nanobind::dlpack::dltensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

// The table that the last successful look-up found; every torch tensor type shares one.
inline const DlpackExchangeApi* known_exchange_api = nullptr;  // guarded by the GIL

// The table of a type, or null; looked up once per type (two are remembered: Tensor and Parameter).
inline const DlpackExchangeApi* exchange_api_of(PyTypeObject* type) noexcept {
  struct Entry {
    PyTypeObject* type = nullptr;
    const DlpackExchangeApi* api = nullptr;
  };
  static std::array<Entry, 2> cache;  // guarded by the GIL
  for (const Entry& e : cache) {
    if (e.type == type) return e.api;
  }
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api =
      static_cast<const DlpackExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->header.major != 1) {
    api = reinterpret_cast<const DlpackExchangeApi*>(api->header.previous);
  }
  if (api == nullptr || api->dltensor_from_py_object_no_sync == nullptr) return nullptr;
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // a cached type must not be freed and reused
  cache[cache[0].type == nullptr ? 0 : 1] = {type, api};
  known_exchange_api = api;
  return api;
}

// DLPack type codes to ours; false for types that no kernel takes.
inline bool to_dtype(uint8_t code, uint8_t bits, uint16_t lanes, DType* out) noexcept {
  if (lanes != 1) return false;
  const int key = code * 256 + bits;
  switch (key) {
    case 2 * 256 + 32:
      *out = DType::kFloat32;
      return true;
    case 4 * 256 + 16:
      *out = DType::kBFloat16;
      return true;
    case 2 * 256 + 16:
      *out = DType::kFloat16;
      return true;
    case 10 * 256 + 8:
      *out = DType::kFloat8E4M3;
      return true;
    case 1 * 256 + 8:
      *out = DType::kUInt8;
      return true;
    case 0 * 256 + 32:
      *out = DType::kInt32;
      return true;
    case 0 * 256 + 64:
      *out = DType::kInt64;
      return true;
    case 6 * 256 + 8:
      *out = DType::kBool;
      return true;
    default:
      return false;
  }
}

inline bool to_tensor_view(PyObject* object, TensorView* out) noexcept {
  const DlpackExchangeApi* api = exchange_api_of(Py_TYPE(object));
  if (api == nullptr) return false;
  nanobind::dlpack::dltensor t;
  if (api->dltensor_from_py_object_no_sync(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (t.ndim > TensorView::kMaxDims) return false;
  if (!to_dtype(t.dtype.code, t.dtype.bits, t.dtype.lanes, &out->dtype)) return false;
  if (t.device.device_type != 1 && t.device.device_type != 2) return false;
  out->device = {t.device.device_type == 2 ? DeviceType::kCuda : DeviceType::kCpu,
                 t.device.device_id};
  int64_t numel = 1;
  for (int d = 0; d < t.ndim; ++d) numel *= t.shape[d];
  if (t.data == nullptr && numel > 0) return false;  // fake tensors and wrappers have no memory
  out->data = static_cast<char*>(t.data) + t.byte_offset;
  out->ndim = t.ndim;
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    out->shape[d] = t.shape[d];
    out->strides[d] = t.strides != nullptr ? t.strides[d] : stride;
    stride *= t.shape[d];
  }
  return true;
}

// Torch's current stream of a CUDA device (a cudaStream_t), for kernels over tensors that came
// through the caster. Null (the default stream) when torch does not tell.
inline void* current_cuda_stream(Device device) noexcept {
  void* stream = nullptr;
  const DlpackExchangeApi* api = known_exchange_api;
  if (device.type != DeviceType::kCuda || api == nullptr || api->current_work_stream == nullptr ||
      api->current_work_stream(2, device.index, &stream) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  return stream;
}

}  // namespace helicore::bindings

namespace nanobind::detail {

template <>
struct type_caster<helicore::TensorView> {
  NB_TYPE_CASTER(helicore::TensorView, const_name("torch.Tensor"))
  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    return helicore::bindings::to_tensor_view(src.ptr(), &value);
  }
};

}  // namespace nanobind::detail
