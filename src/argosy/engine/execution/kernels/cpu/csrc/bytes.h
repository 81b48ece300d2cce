// Rounding of float32 and bfloat16 rows to signed bytes, and their products with unsigned bytes, on any CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace argosy {

using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));
using u16x32 = uint16_t __attribute__((vector_size(64)));

inline u32x16 widen(u8x16 x) { return __builtin_convertvector(x, u32x16); }
inline f32x16 to_float(u32x16 x) { return __builtin_convertvector((i32x16)x, f32x16); }

// Add to each lane of `sum` the products of its four unsigned bytes in `bytes` and the four signed bytes of `word`.
inline u32x16 dot_bytes(u32x16 sum, u32x16 bytes, uint32_t word) {
#if defined(__AVX512VNNI__)
    return (u32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32((int)word));
#elif defined(__AVX2__)
    // Two halves of 256 bits. AVX2 adds pairs of byte products in 16 bits, which could saturate, so bytes are widened.
    struct Halves { __m256i half[2]; } s, b;
    std::memcpy(&s, &sum, 64);
    std::memcpy(&b, &bytes, 64);
    const __m256i x = _mm256_set1_epi32((int)word);
    for (int i = 0; i < 2; i++) {
#ifdef __AVXVNNI__
        s.half[i] = _mm256_dpbusd_avx_epi32(s.half[i], b.half[i], x);
#else
        const __m256i even = _mm256_and_si256(b.half[i], _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(b.half[i], 8);
        const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
        s.half[i] = _mm256_add_epi32(s.half[i], _mm256_madd_epi16(even, x_even));
        s.half[i] = _mm256_add_epi32(s.half[i], _mm256_madd_epi16(odd, x_odd));
#endif
    }
    std::memcpy(&sum, &s, 64);
    return sum;
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (bytes >> shift & 255u) * (uint32_t)(int32_t)(int8_t)(word >> shift);
    return sum;
#endif
}

// Conversion of float32 elements: reads `count` floats, writes 32 floats.
struct Float32Io {
    using Scalar = float;
    static void read(const float *from, int64_t count, float *to) { std::memcpy(to, from, count * 4); }
    static void write(float *to, f32x16 low, f32x16 high) { store(to, low), store(to + 16, high); }
};

// Conversion of bfloat16 elements: reads `count` elements as floats, writes 32 floats as bfloat16.
struct Bfloat16Io {
    using Scalar = uint16_t;
    static void read(const uint16_t *from, int64_t count, float *to) {
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            std::memcpy(to + i, &bits, 4);
        }
    }
    static void write(uint16_t *to, f32x16 low, f32x16 high) { store_bfloat16(to, low, high); }
};

// Round to the nearest integers, ties to even. Magnitudes must be below 2^22.
inline f32x16 round_nearest(f32x16 x) {
    const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum has no fractional bits
    return x + magic - magic;
}

// Scale and sum of rounded values.
struct RoundedBytes {
    float scale;  // value of one unit, or NaN if a value is not finite
    int32_t sum;  // sum of the bytes
};

// Round values to bytes -127..127 times a scale, ties to even. The bytes are 0 if all magnitudes are below MIN_PEAK.
// `count` is a multiple of LANES.
[[gnu::always_inline]] inline RoundedBytes round_to_bytes(const float *values, int64_t count, uint8_t *bytes) {
    constexpr float MIN_PEAK = 1e-30f;
    i32x16 max_bits{};
    for (int64_t i = 0; i < count; i += LANES) {
        const i32x16 bits = load<i32x16>(values + i) & 0x7fffffff;  // same order as the magnitudes, NaN largest
        max_bits = bits > max_bits ? bits : max_bits;
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = max_bits[lane] > bits ? max_bits[lane] : bits;
    float peak;
    std::memcpy(&peak, &bits, 4);
    if (bits >= 0x7f800000 || peak < MIN_PEAK) {
        std::memset(bytes, 0, count);
        return {peak < MIN_PEAK ? 0.0f : __builtin_nanf(""), 0};
    }
    const float inverse = 1.0f / peak * 127.0f;
    i32x16 sum{};
    for (int64_t i = 0; i < count; i += LANES) {
        const i32x16 integers = __builtin_convertvector(round_nearest(load<f32x16>(values + i) * inverse), i32x16);
        sum += integers;
        store(bytes + i, __builtin_convertvector(integers, i8x16));
    }
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return {peak / 127.0f, total};
}

}  // namespace argosy
