// helicore._core.kv: constants and errors of the KV cache manager, and the order of binding. Values
// live in kv_config.cpp, kv_events.cpp and kv_layout.cpp, the classes in kv_cache.cpp,
// kv_manager.cpp and kv_store.cpp.
#include <nanobind/nanobind.h>

#include "helicore/kv/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {

void bind_kv_cache(nb::module_& m);
void bind_kv_config(nb::module_& m);
void bind_kv_events(nb::module_& m);
void bind_kv_layout(nb::module_& m);
void bind_kv_manager(nb::module_& m);
void bind_kv_recording(nb::module_& m);
void bind_kv_sizing(nb::module_& m);
void bind_kv_store(nb::module_& m);

namespace {

using namespace helicore::kv;

void bind_errors(nb::module_& m) {
  nb::exception<LogicError>(m, "LogicError", PyExc_RuntimeError);
  nb::exception<ResourceBusy>(m, "ResourceBusyError", PyExc_RuntimeError);
  nb::exception<DataLost>(m, "DataLostError", PyExc_RuntimeError);
  // OutOfPagesError carries the reason; the class lives as long as the interpreter.
  nb::dict members;
  members["__doc__"] = "There are not enough pages; `reason` tells of what and where.";
  members["reason"] =
      nb::module_::import_("builtins")
          .attr("property")(nb::cpp_function(
              [](nb::handle self) {
                return nb::typed<nb::object, NoRoom>(nb::object(self.attr("_reason")));
              },
              nb::name("reason"), nb::is_method()));
  static PyObject* out_of_pages =
      PyErr_NewException("helicore._core.kv.OutOfPagesError", PyExc_RuntimeError, members.ptr());
  m.attr("OutOfPagesError") = nb::borrow(out_of_pages);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfPages& e) {
      nb::object error = nb::borrow(out_of_pages)(e.what());
      error.attr("_reason") = nb::cast(e.reason());
      PyErr_SetObject(out_of_pages, error.ptr());
    }
  });
}

}  // namespace

void bind_kv(nb::module_& m) {
  m.attr("BAD_PAGE_INDEX") = kBadPageIndex;
  m.attr("DEFAULT_BEAM_INDEX") = kDefaultBeamIndex;
  m.attr("GPU_LEVEL") = kHotLevel;
  m.attr("HOT_LEVEL") = kHotLevel;
  m.attr("PRIORITY_MIN") = kPriorityMin;
  m.attr("PRIORITY_MAX") = kPriorityMax;
  m.attr("PRIORITY_DEFAULT") = kPriorityDefault;
  bind_kv_config(m);
  bind_kv_layout(m);
  bind_kv_events(m);
  bind_kv_recording(m);
  bind_errors(m);
  bind_kv_cache(m);
  bind_kv_sizing(m);
  bind_kv_manager(m);
  bind_kv_store(m);
}

}  // namespace helicore::bindings
