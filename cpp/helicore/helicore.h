// Everything that a program over helicore usually needs. Link helicore::helicore.
//
// Each unit can be included by itself. The headers listed here are the interface; what they do not
// list is internal and may change in any release.
#pragma once

#include "helicore/attention/mla.h"
#include "helicore/comm/communicator.h"
#include "helicore/comm/symmetric_memory.h"
#include "helicore/core/cpu/isa.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"
#include "helicore/core/ledger.h"
#include "helicore/core/tensor_view.h"
#include "helicore/core/thread_pool.h"
#include "helicore/core/types.h"
#include "helicore/kv/config.h"
#include "helicore/kv/errors.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/nn/linear.h"
#include "helicore/quant/norm_epilogue.h"
#include "helicore/quant/row_quantize.h"
