// Arguments of linear layers.
#pragma once

#include <cstdint>

extern "C" {

// Arguments of a call. Sizes are in elements. native_calls.py has the same fields.
struct ArgosyLinear {
    const void *x;       // [rows, cols], rows of `x_stride`
    const void *packed;  // the weight as the format's pack function laid it out
    const float *bias;   // [outs, padded to a multiple of 32], or null
    void *out;           // [rows, outs] in the dtype of x, contiguous
    int64_t rows, cols, outs, x_stride, threads;
};

// Arguments of a call with a grouped weight.
struct ArgosyLinearGroup : ArgosyLinear {
    const uint8_t *table;  // [16] value + 128 of each code
    int64_t group, has_offsets;
};
}
