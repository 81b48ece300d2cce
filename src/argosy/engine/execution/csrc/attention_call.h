// One call of paged attention, as it comes over the C ABI, and the layout of the cache that it works on.
//
// Cache layout, per layer (W = min(16, block_size) keys side by side; D padded to 16 words):
//   keys   [block][kv head][block_size / W][words of D][W]   a word holds one float or two bfloat16
//   values [block][kv head][words of block_size][D]
// so that one 16-lane multiply-add takes 16 keys (scores) or 16 dimensions (values), and both are operands of
// vdpbf16ps and of the matrix unit as they lie.
#pragma once

#include <cstdint>

extern "C" {

// All sizes in elements; mirrored field by field by native.py.
struct ArgosyAttention {
    const void *q;             // [tokens, heads, head_dim], rows of `q_stride`
    const void *k;             // [tokens, kv_heads, head_dim], rows of `k_stride`
    const void *v;             // [tokens, kv_heads, head_dim], rows of `v_stride`
    const float *cos;          // [tokens, turning], as elements.h has them; not read when `turning` is 0
    const float *sin;
    void *out;                 // [tokens, heads, head_dim]
    void *keys;                // this layer's cache
    void *values;
    const int64_t *positions;  // [tokens]
    const int64_t *slots;      // [tokens]
    const int32_t *cu_q;       // [sequences + 1]
    const int32_t *seq_lens;   // [sequences]
    const int32_t *pages;      // [sequences, page_stride]
    int64_t tokens, sequences, page_stride, q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, head_dim, block_size, turning, window, threads;
    float scale, softcap;      // window 0 and softcap 0: none
};
}
