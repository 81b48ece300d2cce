// Arguments of a paged attention call over the C ABI, and the layout of the KV cache.
//
// Cache layout of one layer, with W keys side by side (16 if that divides block_size, else 8) and D padded to 16 words:
//   keys   [block][kv head][block_size / W][words of D][W]   a word holds one float or two bfloat16
//   values [block][kv head][words of block_size][D]
// A cache of int8 has bytes in place of the elements, and float32 scales [W] after each panel of keys and values.
// Without an array of values, the values are the last elements of the keys (multi-head latent attention),
// and int8 keys keep the elements before them in bfloat16.
// One 16-lane multiply-add takes 16 keys (scores) or 16 dimensions (values). Both arrays are operands of vdpbf16ps and
// of the matrix unit without rearrangement.
#pragma once

#include <cstdint>

extern "C" {

// Sizes are in elements. native_calls.py mirrors the struct field by field.
struct ArgosyAttention {
    const void *q;                   // [tokens, heads, head_dim], rows of `q_stride`
    const void *k;                   // [tokens, kv_heads, head_dim], rows of `k_stride`
    const void *v;                   // [tokens, kv_heads, head_dim], rows of `v_stride`; not read without `values`
    const float *cos;                // [tokens, rotary_dim], as in elements.h; not read if `rotary_dim` is 0
    const float *sin;
    const float *sinks;              // null, or [heads], scores of a key without value that every token attends to
    void *out;                       // [tokens, heads, value_dim]
    void *keys;                      // this layer's cache
    void *values;                    // null if the values are the last `value_dim` elements of the keys
    const int64_t *positions;        // [tokens]
    const int64_t *slot_mapping;     // [tokens], of the layer's KV cache group
    const int32_t *query_start_loc;  // [sequences + 1]
    const int32_t *seq_lens;         // [sequences]
    const int32_t *block_table;      // [sequences, block_table_stride], of the layer's KV cache group
    int64_t tokens, sequences, block_table_stride, q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, head_dim, value_dim;  // value_dim is head_dim if there are `values`
    int64_t block_size, rotary_dim, window, threads;
    float scale, softcap;  // window 0 and softcap 0 disable them
};
}
