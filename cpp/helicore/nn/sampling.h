// Choosing the next token: penalties, filters, the draw, log-probabilities.
//
// logits are float32 [B, V] with contiguous rows (row stride allowed). Rows are processed in
// parallel and do not influence each other. Ragged per-row lists are CSR: row_ptr int32 [B + 1]
// ascending from 0, then flat arrays. Token ids outside [0, V) throw InvalidArgument and leave the
// logits as they were.
#pragma once

#include "helicore/core/tensor_view.h"

namespace helicore::nn {

// Per-row settings, all [B].
struct SampleTensors {
  TensorView logits;       // [B, V], not changed
  TensorView temperature;  // float32 >= 0; 0 is greedy (lowest id among equals)
  TensorView top_k;  // int32; < 1 or >= V: off. Exactly k tokens are kept, equal logits by lower id
  TensorView top_p;  // float32 in (0, 1]; keeps the shortest prefix by descending probability that
                     // reaches p
  TensorView min_p;  // float32 in [0, 1]; keeps probability >= min_p times the highest
  TensorView seed;   // int64, the bits of an unsigned seed
  TensorView position;  // int64, the bits of an unsigned counter: one per token of the request
  TensorView ids;       // out: int32
  const TensorView* logprobs =
      nullptr;  // out: float32 log-softmax(logits)[id], before temperature; or null
};

// Order of the filters: temperature, min_p, top_k, top_p (each over what the one before left). A
// row with a NaN, or with nothing but -inf, gets id -1 and logprob NaN. Settings out of range throw
// and name the row.
void sample(const SampleTensors& tensors);

// For each row the log-softmax of ids[row], its rank (1 + tokens with a greater logit), and the n
// best tokens (descending, equal logits by lower id). A row with a NaN gives NaN values, rank 0 and
// ids 0, 1, 2, ...
struct LogprobTensors {
  TensorView logits;        // [B, V]
  TensorView ids;           // int32 [B]; -1 skips the row's chosen value (NaN, rank 0)
  TensorView logprobs;      // out: float32 [B]
  TensorView ranks;         // out: int32 [B]
  TensorView top_ids;       // out: int32 [B, n], 0 <= n <= V
  TensorView top_logprobs;  // out: float32 [B, n]
};
void top_logprobs(const LogprobTensors& tensors);

// Ragged token lists, one per row.
struct TokenLists {
  TensorView row_ptr;  // int32 [B + 1]
  TensorView ids;      // int32 [row_ptr[B]]
};

struct PenaltyTensors {
  TensorView logits;  // [B, V], changed in place
  TokenLists prompt;
  TokenLists output;
  TensorView repetition;  // float32 [B] > 0; tokens of prompt and output: logit / r when > 0, else
                          // logit * r
  TensorView presence;    // float32 [B]; then subtracted once for a token of the output
  TensorView frequency;   // float32 [B]; and once for each occurrence in the output
};
void apply_penalties(const PenaltyTensors& tensors);

// logits[row, id] += value; an id that is listed twice gets both.
void apply_logit_bias(const TensorView& logits, const TokenLists& tokens, const TensorView& values);

// logits[row, id] = -inf.
void mask_tokens(const TensorView& logits, const TokenLists& tokens);

}  // namespace helicore::nn
