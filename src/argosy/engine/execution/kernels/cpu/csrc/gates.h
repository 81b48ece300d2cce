// Gate of SiLU, GELU and sigmoid on sixteen lanes.
#pragma once

#include "simd.h"

namespace argosy {

constexpr float LOG2E = 1.44269504088896341f;

// Compute x / (1 + 2^-t), the form of SiLU (Elfwing et al. 2017) and of GELU's tanh variant (Hendrycks & Gimpel 2016).
inline f32x16 sigmoid_gate(f32x16 x, f32x16 t) {
    const f32x16 denominator = 1.0f + exp2_lanes(-t > 126.0f ? broadcast(126.0f) : -t);
#ifdef __AVX512F__
    // The approximation has a relative error of 2^-14. One Newton step doubles the number of correct bits.
    const f32x16 reciprocal = (f32x16)_mm512_rcp14_ps((__m512)denominator);
    return x * (reciprocal * (2.0f - denominator * reciprocal));
#else
    return x / denominator;
#endif
}

}  // namespace argosy
