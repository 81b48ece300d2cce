// What a layer does to a row between its matrices: norm and gate, behind a plain C ABI.
//
// A row is worked on by one thread, element by element in order, with arithmetic that no other row touches.

#include <algorithm>
#include <cmath>

#include "elements.h"

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
}

namespace {

using namespace argosy;

constexpr int64_t SHARED = 1 << 17;  // elements from which on threads share: to wake one costs tens of microseconds
constexpr float LOG2E = 1.44269504088896341f;

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
    const f32x16 below = 1.0f + exp2_of(-t > 126.0f ? broadcast(126.0f) : -t);
#ifdef __AVX512F__
    const f32x16 near = (f32x16)_mm512_rcp14_ps((__m512)below);  // to 2^-14; a step of Newton's doubles the digits
    return x * (near * (2.0f - below * near));
#else
    return x / below;
#endif
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

}  // namespace

extern "C" {

void argosy_norm_float32(const ArgosyNorm *call) { norm<FloatRow>(*call); }
void argosy_norm_bfloat16(const ArgosyNorm *call) { norm<Bfloat16Row>(*call); }
void argosy_silu_float32(const ArgosyGate *call) { gate<FloatRow, Silu>(*call); }
void argosy_silu_bfloat16(const ArgosyGate *call) { gate<Bfloat16Row, Silu>(*call); }
void argosy_gelu_tanh_float32(const ArgosyGate *call) { gate<FloatRow, GeluTanh>(*call); }
void argosy_gelu_tanh_bfloat16(const ArgosyGate *call) { gate<Bfloat16Row, GeluTanh>(*call); }
}
