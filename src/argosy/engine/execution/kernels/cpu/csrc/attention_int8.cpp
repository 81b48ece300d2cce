// Paged causal attention over a cache of bytes, behind a C ABI. A file of its own, since each of both compiles for long.

#include "attention_kernel.h"

extern "C" {

void argosy_attention_int8_float32(const ArgosyAttention *call) { attend_float32<true>(*call); }
void argosy_attention_int8_bfloat16(const ArgosyAttention *call) { attend_bfloat16<true>(*call); }
}
