// What a layer does to a row between its matrices: norm, gate, rotation. Behind a plain C ABI.
//
// A row is worked on by one thread, element by element in order, with arithmetic that no other row touches.

#include <algorithm>
#include <cmath>

#include "simd.h"

extern "C" {

// RMS norm of [outer, inner, size]; sizes in elements; each struct is mirrored field by field by native.py.
struct ArgosyNorm {
    void *x;              // rows of `size`, `inner` side by side, `x_stride` from one outer index to the next
    const void *add;      // null, or [outer, inner, size], contiguous, that is added to x first
    const float *weight;  // [size]
    void *out;            // [outer, inner, size], contiguous
    int64_t outer, inner, size, x_stride, narrow, threads;  // narrow: round before the weight, too
    float eps;
};

// out = activation(x[:, :size]) * x[:, size:]
struct ArgosyGate {
    const void *x;  // [rows, 2 * size], contiguous
    void *out;      // [rows, size], contiguous
    int64_t rows, size, threads;
};

// Rotates the first `turning` elements of each head in place.
struct ArgosyRotation {
    void *x;           // [tokens, heads, head_dim], tokens `x_stride` apart
    const float *cos;  // [tokens, turning], its halves alike
    const float *sin;  // [tokens, turning], its first half negative
    int64_t tokens, heads, head_dim, x_stride, turning, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t SHARED = 1 << 17;  // elements from which on threads share: to wake one costs tens of microseconds
constexpr float LOG2E = 1.44269504088896341f;

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
    static f32x16 get(const uint16_t *from, int64_t count) {
        u16x16 x{};
        if (count >= LANES)
            x = load<u16x16>(from);
        else
            std::memcpy(&x, from, count * sizeof *from);
        return (f32x16)(__builtin_convertvector(x, u32x16) << 16);
    }
    static void put(uint16_t *to, f32x16 x, int64_t count) {
        const u16x16 bits = halves(to_bfloat16(x));
        if (count >= LANES) return store(to, bits);
        std::memcpy(to, &bits, count * sizeof *to);
    }
    static f32x16 rounded(f32x16 x) { return (f32x16)(to_bfloat16(x) << 16); }
};

template <class Row> void norm(const ArgosyNorm &a) {
    using Scalar = typename Row::Scalar;
    const int64_t rows = a.outer * a.inner;
#pragma omp parallel for schedule(static) num_threads((int)a.threads) if (rows * a.size >= SHARED)
    for (int64_t row = 0; row < rows; row++) {
        Scalar *x = (Scalar *)a.x + row / a.inner * a.x_stride + row % a.inner * a.size;
        Scalar *out = (Scalar *)a.out + row * a.size;
        f32x16 squares{};
        for (int64_t i = 0; i < a.size; i += LANES) {
            f32x16 value = Row::get(x + i, a.size - i);
            if (a.add) {
                value = Row::rounded(value + Row::get((const Scalar *)a.add + row * a.size + i, a.size - i));
                Row::put(x + i, value, a.size - i);
            }
            squares += value * value;
        }
        const float scale = 1.0f / std::sqrt(reduce_sum(squares) / (float)a.size + a.eps);
        for (int64_t i = 0; i < a.size; i += LANES) {
            const f32x16 even = Row::get(x + i, a.size - i) * scale;
            const f32x16 weight = FloatRow::get(a.weight + i, a.size - i);
            Row::put(out + i, (a.narrow ? Row::rounded(even) : even) * weight, a.size - i);
        }
    }
}

// x / (1 + 2^-t), where t grows with x: SiLU (Elfwing et al. 2017) and GELU's tanh form (Hendrycks & Gimpel 2016).
f32x16 gated(f32x16 x, f32x16 t) {
    return x / (1.0f + exp2_of(-t > 126.0f ? broadcast(126.0f) : -t));
}

struct Silu {
    static f32x16 of(f32x16 x) { return gated(x, x * LOG2E); }
};

struct GeluTanh {
    static f32x16 of(f32x16 x) {
        const float twice = 1.5957691216057308f * LOG2E;  // 2 sqrt(2 / pi): (1 + tanh y) / 2 = 1 / (1 + e^-2y)
        return gated(x, x * (1.0f + 0.044715f * x * x) * twice);
    }
};

template <class Row, class Activation> void gate(const ArgosyGate &a) {
    using Scalar = typename Row::Scalar;
#pragma omp parallel for schedule(static) num_threads((int)a.threads) if (a.rows * a.size >= SHARED)
    for (int64_t row = 0; row < a.rows; row++) {
        const Scalar *x = (const Scalar *)a.x + row * 2 * a.size;
        Scalar *out = (Scalar *)a.out + row * a.size;
        for (int64_t i = 0; i < a.size; i += LANES) {
            const f32x16 up = Row::get(x + a.size + i, a.size - i);
            Row::put(out + i, Activation::of(Row::get(x + i, a.size - i)) * up, a.size - i);
        }
    }
}

template <class Row> void rotate(const ArgosyRotation &a) {
    using Scalar = typename Row::Scalar;
    const int64_t half = a.turning / 2;
#pragma omp parallel for schedule(static) num_threads((int)a.threads) if (a.tokens * a.heads * a.turning >= SHARED)
    for (int64_t token = 0; token < a.tokens; token++) {
        const float *cos = a.cos + token * a.turning, *sin = a.sin + token * a.turning;
        for (int64_t head = 0; head < a.heads; head++) {
            Scalar *x = (Scalar *)a.x + token * a.x_stride + head * a.head_dim;
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t left = half - i;
                const f32x16 first = Row::get(x + i, left), second = Row::get(x + half + i, left);
                const f32x16 turn = FloatRow::get(cos + i, left), swap = FloatRow::get(sin + half + i, left);
                Row::put(x + i, first * turn - second * swap, left);
                Row::put(x + half + i, second * turn + first * swap, left);
            }
        }
    }
}

}  // namespace

extern "C" {

void argosy_norm_float32(const ArgosyNorm *call) { norm<FloatRow>(*call); }
void argosy_norm_bfloat16(const ArgosyNorm *call) { norm<Bfloat16Row>(*call); }
void argosy_silu_float32(const ArgosyGate *call) { gate<FloatRow, Silu>(*call); }
void argosy_silu_bfloat16(const ArgosyGate *call) { gate<Bfloat16Row, Silu>(*call); }
void argosy_gelu_tanh_float32(const ArgosyGate *call) { gate<FloatRow, GeluTanh>(*call); }
void argosy_gelu_tanh_bfloat16(const ArgosyGate *call) { gate<Bfloat16Row, GeluTanh>(*call); }
void argosy_rotate_float32(const ArgosyRotation *call) { rotate<FloatRow>(*call); }
void argosy_rotate_bfloat16(const ArgosyRotation *call) { rotate<Bfloat16Row>(*call); }
}
