// Norms and gated activations, behind a C ABI.
//
// One thread processes a row, element by element in order, with arithmetic that no other row affects.

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "gates.h"
#include "threads.h"

extern "C" {

// Arguments of an RMS norm (Zhang & Sennrich 2019) of x [outer_size, inner_size, size]. Sizes are in elements.
// native_calls.py mirrors both structs field by field.
struct ArgosyNorm {
    void *x;              // rows of `size`: `inner_size` contiguous rows for each outer index, `x_stride` apart
    const void *delta;    // null, or [outer_size, inner_size, size], contiguous, which is added to x in place first
    const float *weight;  // [size]
    void *out;            // [outer_size, inner_size, size], contiguous
    int64_t outer_size, inner_size, size, x_stride;
    int64_t round_before_weight;  // whether x / rms is rounded to the dtype before it is multiplied by the weight
    int64_t threads;
    float eps;
};

// Arguments of out = activation(x[:, :size], x[:, size:]).
struct ArgosyGatedActivation {
    const void *x;  // [rows, 2 * size], contiguous
    void *out;      // [rows, size], contiguous
    int64_t rows, size, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 17;  // below this, one thread is faster: a wake-up costs tens of us

template <class Row> void run_norm(const ArgosyNorm &a) {
    using Scalar = typename Row::Scalar;
    const int64_t rows = a.outer_size * a.inner_size;
    const int threads = limit_threads(a.threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * a.size >= MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        Scalar *x = (Scalar *)a.x + row / a.inner_size * a.x_stride + row % a.inner_size * a.size;
        Scalar *out = (Scalar *)a.out + row * a.size;
        f32x16 squares{};
        for (int64_t i = 0; i < a.size; i += LANES) {
            f32x16 value = Row::load_lanes(x + i, a.size - i);
            if (a.delta) {
                const Scalar *delta = (const Scalar *)a.delta + row * a.size + i;
                value = Row::round_to_element(value + Row::load_lanes(delta, a.size - i));
                Row::store_lanes(x + i, value, a.size - i);
            }
            squares += value * value;
        }
        const float scale = 1.0f / std::sqrt(reduce_sum(squares) / (float)a.size + a.eps);
        for (int64_t i = 0; i < a.size; i += LANES) {
            const f32x16 normalized = Row::load_lanes(x + i, a.size - i) * scale;
            const f32x16 weight = FloatRow::load_lanes(a.weight + i, a.size - i);
            Row::store_lanes(out + i, (a.round_before_weight ? Row::round_to_element(normalized) : normalized) * weight,
                             a.size - i);
        }
    }
}

struct Silu {
    static f32x16 apply(f32x16 x, f32x16 up) { return sigmoid_gate(x, x * LOG2E) * up; }
};

struct GeluTanh {
    static f32x16 apply(f32x16 x, f32x16 up) {
        const float factor = 1.5957691216057308f * LOG2E;  // 2 sqrt(2 / pi): (1 + tanh y) / 2 = 1 / (1 + e^-2y)
        return sigmoid_gate(x, x * (1.0f + 0.044715f * x * x) * factor) * up;
    }
};

// Activation of gpt-oss. NaN passes through both clamps.
struct ClampedSwiglu {
    static f32x16 apply(f32x16 x, f32x16 up) {
        const f32x16 limit = broadcast(7.0f);
        const f32x16 gate = x > limit ? limit : x;
        const f32x16 bounded = up > limit ? limit : up < -limit ? -limit : up;
        return sigmoid_gate(gate, gate * (1.702f * LOG2E)) * (bounded + 1.0f);
    }
};

struct Sigmoid {
    static f32x16 apply(f32x16 x, f32x16 up) { return sigmoid_gate(broadcast(1.0f), x * LOG2E) * up; }
};

template <class Row, class Activation> void run_gated_activation(const ArgosyGatedActivation &a) {
    using Scalar = typename Row::Scalar;
    const int threads = limit_threads(a.threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.rows * a.size >= MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < a.rows; row++) {
        const Scalar *x = (const Scalar *)a.x + row * 2 * a.size;
        Scalar *out = (Scalar *)a.out + row * a.size;
        for (int64_t i = 0; i < a.size; i += LANES) {
            const f32x16 up = Row::load_lanes(x + a.size + i, a.size - i);
            Row::store_lanes(out + i, Activation::apply(Row::load_lanes(x + i, a.size - i), up), a.size - i);
        }
    }
}

}  // namespace

extern "C" {

void argosy_norm_float32(const ArgosyNorm *call) { run_norm<FloatRow>(*call); }
void argosy_norm_bfloat16(const ArgosyNorm *call) { run_norm<Bfloat16Row>(*call); }
void argosy_silu_float32(const ArgosyGatedActivation *call) { run_gated_activation<FloatRow, Silu>(*call); }
void argosy_silu_bfloat16(const ArgosyGatedActivation *call) { run_gated_activation<Bfloat16Row, Silu>(*call); }
void argosy_gelu_tanh_float32(const ArgosyGatedActivation *call) { run_gated_activation<FloatRow, GeluTanh>(*call); }
void argosy_gelu_tanh_bfloat16(const ArgosyGatedActivation *call) {
    run_gated_activation<Bfloat16Row, GeluTanh>(*call);
}
void argosy_clamped_swiglu_float32(const ArgosyGatedActivation *call) {
    run_gated_activation<FloatRow, ClampedSwiglu>(*call);
}
void argosy_clamped_swiglu_bfloat16(const ArgosyGatedActivation *call) {
    run_gated_activation<Bfloat16Row, ClampedSwiglu>(*call);
}
void argosy_sigmoid_float32(const ArgosyGatedActivation *call) { run_gated_activation<FloatRow, Sigmoid>(*call); }
void argosy_sigmoid_bfloat16(const ArgosyGatedActivation *call) { run_gated_activation<Bfloat16Row, Sigmoid>(*call); }
}
