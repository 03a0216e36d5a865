// The module helicore._core: one submodule per area, bound in dependency order.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace helicore::bindings {
void bind_exceptions(nb::module_& m);
void bind_core(nb::module_& m);
void bind_quant(nb::module_& m);
void bind_comm(nb::module_& m);
void bind_nn(nb::module_& m);
void bind_nn_cuda(nb::module_& m);
void bind_kv(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_attention_cuda(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_moe_cuda(nb::module_& m);
}  // namespace helicore::bindings

NB_MODULE(_core, m) {
  using namespace helicore::bindings;
  m.doc() = "Native core of helicore: one submodule per area.";
  bind_exceptions(m);
  auto submodule = [&m](const char* name, const char* doc, void (*bind)(nb::module_&)) {
    nb::module_ sub = m.def_submodule(name, doc);
    bind(sub);
  };
  submodule("core", "Threads, instruction sets and build facts.", bind_core);
#ifdef HELICORE_BIND_QUANT
  submodule("quant", "Number formats: quantise and dequantise.", bind_quant);
#endif
#ifdef HELICORE_BIND_COMM
  submodule("comm", "Collective calls of ranks that share memory.", bind_comm);
#endif
#ifdef HELICORE_BIND_NN
  submodule("nn", "Norms, small-batch linear layers, activations, sampling.", [](nb::module_& sub) {
    bind_nn(sub);
    bind_nn_cuda(sub);
  });
#endif
#ifdef HELICORE_BIND_KV
  submodule("kv", "KV cache manager.", bind_kv);
#endif
#ifdef HELICORE_BIND_ATTENTION
  submodule("attention", "MLA: append, decode, prefill, merge.", [](nb::module_& sub) {
    bind_attention(sub);
    bind_attention_cuda(sub);
  });
#endif
#ifdef HELICORE_BIND_MOE
  submodule("moe", "Mixture of experts: router and experts.", [](nb::module_& sub) {
    bind_moe(sub);
    bind_moe_cuda(sub);
  });
#endif
}
