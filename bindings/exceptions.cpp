// Every C++ error and its Python class, in one table.
//   InvalidArgument (std::invalid_argument) -> ValueError      OutOfMemory   -> MemoryError
//   NotSupported  -> helicore.NotSupportedError (RuntimeError)  CudaError     -> helicore.CudaError
//   (RuntimeError) InternalError -> helicore.InternalError (RuntimeError)
#include <nanobind/nanobind.h>

#include <exception>

#include "helicore/core/error.h"

namespace nb = nanobind;

namespace helicore::bindings {

void bind_exceptions(nb::module_& m) {
  // Registered translators run last-registered first.
  nb::exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  nb::exception<NotSupported>(m, "NotSupportedError", PyExc_RuntimeError);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfMemory& e) {
      PyErr_SetString(PyExc_MemoryError, e.what());
    }
  });
}

}  // namespace helicore::bindings
