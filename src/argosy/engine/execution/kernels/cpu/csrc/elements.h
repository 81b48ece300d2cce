// Loads and stores of row elements as sixteen float32 lanes, and the rotary rotation of a row.
#pragma once

#include "simd.h"

namespace argosy {

inline u32x16 as_words(u16x16 x) {
#ifdef __AVX512F__
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, u32x16);
#endif
}

// Access to float32 rows. Up to sixteen elements are loaded, and the remaining lanes are zero.
struct FloatRow {
    using Scalar = float;
    static f32x16 load_lanes(const float *from, int64_t count) {
        if (count >= LANES) return load<f32x16>(from);
        f32x16 x{};
        std::memcpy(&x, from, count * sizeof(float));
        return x;
    }
    static void store_lanes(float *to, f32x16 x, int64_t count) {
        if (count >= LANES) return store(to, x);
        std::memcpy(to, &x, count * sizeof(float));
    }
    static f32x16 round_to_element(f32x16 x) { return x; }
};

// Access to bfloat16 rows, converted to and from float32 lanes.
struct Bfloat16Row {
    using Scalar = uint16_t;
    static u16x16 to_element(f32x16 x) {
#ifdef __AVX512BF16__
        return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
        return low_halves(to_bfloat16(x));
#endif
    }
    static f32x16 to_float(u16x16 x) { return (f32x16)(as_words(x) << 16); }
    static f32x16 load_lanes(const uint16_t *from, int64_t count) {
        u16x16 x{};
        if (count >= LANES)
            x = load<u16x16>(from);
        else
            std::memcpy(&x, from, count * sizeof *from);
        return to_float(x);
    }
    static void store_lanes(uint16_t *to, f32x16 x, int64_t count) {
        const u16x16 bits = to_element(x);
        if (count >= LANES) return store(to, bits);
        std::memcpy(to, &bits, count * sizeof *to);
    }
    static f32x16 round_to_element(f32x16 x) { return to_float(to_element(x)); }
};

// Apply the rotary position embedding (Su et al. 2021) to the first `rotary_dim` elements of a row, in float32 with one
// rounding. `to` may equal `from`. The halves of cos [rotary_dim] are equal, and sin [rotary_dim] has its first half
// negated.
template <class Row, class Scalar>
inline void rotate(Scalar *to, const Scalar *from, const float *cos, const float *sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t remaining = half - i;
        const f32x16 first = Row::load_lanes(from + i, remaining), second = Row::load_lanes(from + half + i, remaining);
        const f32x16 cosine = FloatRow::load_lanes(cos + i, remaining);
        const f32x16 sine = FloatRow::load_lanes(sin + half + i, remaining);
        Row::store_lanes(to + i, first * cosine - second * sine, remaining);
        Row::store_lanes(to + half + i, second * cosine + first * sine, remaining);
    }
}

}  // namespace argosy
