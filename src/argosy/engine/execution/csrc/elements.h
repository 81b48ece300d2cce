// Rows of elements in memory, sixteen at a time as float lanes, and the rotation of a row.
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

// Up to sixteen elements in float32 lanes; the lanes beyond are zero.
struct FloatRow {
    using Scalar = float;
    static f32x16 get(const float *from, int64_t count) {
        if (count >= LANES) return load<f32x16>(from);
        f32x16 x{};
        std::memcpy(&x, from, count * sizeof(float));
        return x;
    }
    static void put(float *to, f32x16 x, int64_t count) {
        if (count >= LANES) return store(to, x);
        std::memcpy(to, &x, count * sizeof(float));
    }
    static f32x16 rounded(f32x16 x) { return x; }
};

struct Bfloat16Row {
    using Scalar = uint16_t;
    static u16x16 narrow(f32x16 x) {
#ifdef __AVX512BF16__
        return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
        return halves(to_bfloat16(x));
#endif
    }
    static f32x16 wide(u16x16 x) { return (f32x16)(as_words(x) << 16); }
    static f32x16 get(const uint16_t *from, int64_t count) {
        u16x16 x{};
        if (count >= LANES)
            x = load<u16x16>(from);
        else
            std::memcpy(&x, from, count * sizeof *from);
        return wide(x);
    }
    static void put(uint16_t *to, f32x16 x, int64_t count) {
        const u16x16 bits = narrow(x);
        if (count >= LANES) return store(to, bits);
        std::memcpy(to, &bits, count * sizeof *to);
    }
    static f32x16 rounded(f32x16 x) { return wide(narrow(x)); }
};

// Rotary position embedding (Su et al. 2021) of the first `turning` elements of a row, in float32 and rounded once;
// `to` may be `from`. cos: [turning], its halves alike; sin: [turning], its first half negative.
template <class Row, class Scalar>
inline void rotate(Scalar *to, const Scalar *from, const float *cos, const float *sin, int64_t turning) {
    const int64_t half = turning / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const f32x16 first = Row::get(from + i, left), second = Row::get(from + half + i, left);
        const f32x16 turn = FloatRow::get(cos + i, left), swap = FloatRow::get(sin + half + i, left);
        Row::put(to + i, first * turn - second * swap, left);
        Row::put(to + half + i, second * turn + first * swap, left);
    }
}

}  // namespace argosy
