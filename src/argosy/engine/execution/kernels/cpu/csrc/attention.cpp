// Paged causal attention over a cache in the dtype of the queries, behind a C ABI.

#include "attention_kernel.h"

extern "C" {

void argosy_attention_float32(const ArgosyAttention *call) { attend_float32<false>(*call); }
void argosy_attention_bfloat16(const ArgosyAttention *call) { attend_bfloat16<false>(*call); }
}
