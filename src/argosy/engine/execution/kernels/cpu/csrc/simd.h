// Vectors of sixteen lanes and the operations on them that the kernels need, on any CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace argosy {

using u32x16 = uint32_t __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using f32x16 = float __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int LANES = 16;

// Number of lanes of the widest register, and vectors of that width for sums that stay in registers.
#if defined(__AVX512F__)
constexpr int NATIVE_LANES = 16;
#elif defined(__AVX__)
constexpr int NATIVE_LANES = 8;
#else
constexpr int NATIVE_LANES = 4;
#endif
using native_u32 = uint32_t __attribute__((vector_size(4 * NATIVE_LANES)));
using native_f32 = float __attribute__((vector_size(4 * NATIVE_LANES)));

template <class V> inline V load(const void *from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V> inline void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }

inline f32x16 broadcast(float x) { return x - f32x16{}; }

inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline float reduce_max(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

inline float reduce_sum(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float part[LANES];
    store(part, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

// Compute 2^x for x <= 126 to about 2e-7 relative. The result is exactly 1 at 0, 0 below -126, and NaN for NaN.
inline f32x16 exp2_lanes(f32x16 x) {
#ifdef __AVX512F__
    const f32x16 integer = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const f32x16 f = x - integer;
#else
    const f32x16 clamped = x < -126.0f ? broadcast(-126.0f) : x;
    const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = clamped + magic;
    const f32x16 f = clamped - (shifted - magic);
    const i32x16 n = (i32x16)shifted - (i32x16)magic;
#endif
    f32x16 p = broadcast(1.3264727e-3f);  // minimax polynomial on [-1/2, 1/2]
    p = p * f + 9.6715127e-3f;
    p = p * f + 5.5507337e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.9314698e-1f;
    p = p * f + 1.0f;
#ifdef __AVX512F__
    const __mmask16 large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(large, (__m512)p, (__m512)integer);
#else
    p = p * (f32x16)((n + 127) << 23);
    return x < -126.0f ? f32x16{} : p;
#endif
}

// Round to the nearest bfloat16, ties to even, in the low half of each lane.
inline u32x16 to_bfloat16(f32x16 x) {
    const u32x16 bits = (u32x16)x;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline u16x16 low_halves(u32x16 x) { return __builtin_convertvector(x, u16x16); }

// Store 32 floats as bfloat16. `to` needs no alignment.
inline void store_bfloat16(void *to, f32x16 first, f32x16 second) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    store(to, low_halves(to_bfloat16(first)));
    store((char *)to + 32, low_halves(to_bfloat16(second)));
#endif
}

// Convert sixteen signed bytes to float32.
inline f32x16 bytes_to_float(const void *from) {
#ifdef __AVX512F__
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    using i8x16 = int8_t __attribute__((vector_size(16)));
    return __builtin_convertvector(__builtin_convertvector(load<i8x16>(from), i32x16), f32x16);
#endif
}

// Element types of 32-bit words: the number of elements per word, and madd, which adds a * b to `sum` per lane.
struct Float {
    using Scalar = float;
    static constexpr int PER_WORD = 1;
    // Convert 16 bytes to the same number of elements, exactly.
    static inline void expand_bytes(void *to, const void *from) { store(to, bytes_to_float(from)); }
    static inline f32x16 madd(f32x16 sum, uint32_t a, u32x16 b) {
        float scalar;
        std::memcpy(&scalar, &a, 4);
        return sum + scalar * (f32x16)b;
    }
};

struct Bfloat16 {
    using Scalar = uint16_t;
    static constexpr int PER_WORD = 2;
    // Convert 32 bytes to the same number of elements, exactly.
    static inline void expand_bytes(void *to, const void *from) {
        store_bfloat16(to, bytes_to_float(from), bytes_to_float((const char *)from + LANES));
    }
    static inline f32x16 madd(f32x16 sum, uint32_t a, u32x16 b) {
#ifdef __AVX512BF16__
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#else
        const uint32_t low_bits = a << 16, high_bits = a & 0xffff0000u;
        float low, high;
        std::memcpy(&low, &low_bits, 4);
        std::memcpy(&high, &high_bits, 4);
        sum = sum + low * (f32x16)(b << 16);
        return sum + high * (f32x16)(b & 0xffff0000u);
#endif
    }
};

}  // namespace argosy
