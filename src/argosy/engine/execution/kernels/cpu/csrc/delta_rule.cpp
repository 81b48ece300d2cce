// Gated delta rule (Yang et al. 2024) of one layer, behind a C ABI.
//
// The recurrence runs token by token in float32. Every column of a head's matrix is computed in one order, whatever else
// is in the batch and however a sequence is divided into chunks.

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "gates.h"
#include "threads.h"

extern "C" {

// Arguments of a call, with sizes in elements. native_calls.py mirrors the struct field by field.
struct ArgosyDeltaRule {
    const void *qkv;           // [tokens, channels], rows `qkv_stride` apart: queries, keys and values of all heads
    const float *factors;      // [tokens, 2 * value_heads], contiguous: logits of the update's factor, then of the decay
    const float *conv;         // [width, channels]
    const float *decay_rate;   // [value_heads], negative
    const float *decay_bias;   // [value_heads]
    float *states;             // this layer's part of slot 0: matrices [value_heads, key_dim, value_dim], then the last
                               // inputs of the convolution [width - 1, channels]. Slots are `state_stride` apart.
    float *mixed;              // [tokens, channels], scratch: results of the convolution
    float *scratch;            // [tokens, 2 * value_heads], scratch: factors of updates, and decays
    void *out;                 // [tokens, value_heads, value_dim], contiguous
    const int64_t *rows;       // [sequences], slot of each sequence
    const int64_t *positions;  // [tokens]. A sequence whose first position is 0 starts with a state of zeros.
    const int64_t *save_slots; // null, or [tokens]: slot to which the state after the token is also written, or negative
    const int32_t *query_start_loc;  // [sequences + 1]
    int64_t tokens, sequences, qkv_stride, state_stride;
    int64_t key_heads, value_heads, key_dim, value_dim, width, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 16;  // below this, one thread is faster
constexpr int64_t MAX_WIDTH = 8;
constexpr int64_t CONV_CHANNELS = 256;  // channels of a work item of the convolution
constexpr int VECTORS = 2;              // vectors of a row in a work item of the recurrence
constexpr int SUMS = 2;                 // sums over alternating rows, so that additions do not wait for each other
constexpr int64_t COLUMNS = VECTORS * LANES;
constexpr int64_t MAX_LOCAL_ROWS = 256;
constexpr float NORM_EPS = 1e-6f;

int64_t count_channels(const ArgosyDeltaRule &a) {
    return 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
}

int64_t saved_slot(const ArgosyDeltaRule &a, int64_t token) { return a.save_slots ? a.save_slots[token] : -1; }

// Convolve some channels of a sequence causally, and apply SiLU.
template <class Row> void convolve(const ArgosyDeltaRule &a, int64_t sequence, int64_t first, int64_t end) {
    using Scalar = typename Row::Scalar;
    const int64_t channels = count_channels(a), last = a.width - 1;
    const int64_t start = a.query_start_loc[sequence], stop = a.query_start_loc[sequence + 1];
    const int64_t matrices = a.value_heads * a.key_dim * a.value_dim;
    const auto inputs_of = [&](int64_t slot) { return a.states + slot * a.state_stride + matrices; };
    for (int64_t c = first; c < end; c += LANES) {
        const int64_t rest = channels - c;
        f32x16 weight[MAX_WIDTH], inputs[MAX_WIDTH] = {};
        for (int64_t i = 0; i < a.width; i++) weight[i] = FloatRow::load_lanes(a.conv + i * channels + c, rest);
        float *own = inputs_of(a.rows[sequence]) + c;
        if (a.positions[start])
            for (int64_t i = 0; i < last; i++) inputs[i] = FloatRow::load_lanes(own + i * channels, rest);
        const auto save = [&](float *to) {
            for (int64_t i = 0; i < last; i++) FloatRow::store_lanes(to + i * channels, inputs[i], rest);
        };
        for (int64_t t = start; t < stop; t++) {
            inputs[last] = Row::load_lanes((const Scalar *)a.qkv + t * a.qkv_stride + c, rest);
            f32x16 sum{};
            for (int64_t i = 0; i < a.width; i++) sum += inputs[i] * weight[i];
            FloatRow::store_lanes(a.mixed + t * channels + c, sigmoid_gate(sum, sum * LOG2E), rest);
            for (int64_t i = 0; i < last; i++) inputs[i] = inputs[i + 1];
            const int64_t slot = saved_slot(a, t);
            if (slot >= 0) save(inputs_of(slot) + c);
        }
        save(own);
    }
}

// Normalize a head's query or key to length `scale`.
void normalize(float *x, int64_t size, float scale) {
    f32x16 squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x16 value = FloatRow::load_lanes(x + i, size - i);
        squares += value * value;
    }
    const float factor = scale / std::sqrt(reduce_sum(squares) + NORM_EPS);
    for (int64_t i = 0; i < size; i += LANES)
        FloatRow::store_lanes(x + i, FloatRow::load_lanes(x + i, size - i) * factor, size - i);
}

// Normalize a token's queries and keys, and compute the factor and the decay of each value head.
void prepare(const ArgosyDeltaRule &a, int64_t token) {
    float *heads = a.mixed + token * count_channels(a);
    const float query_scale = 1.0f / std::sqrt((float)a.key_dim);
    for (int64_t head = 0; head < 2 * a.key_heads; head++)
        normalize(heads + head * a.key_dim, a.key_dim, head < a.key_heads ? query_scale : 1.0f);
    const float *logits = a.factors + token * 2 * a.value_heads;
    float *scratch = a.scratch + token * 2 * a.value_heads;
    for (int64_t head = 0; head < a.value_heads; head++) {
        const float x = logits[a.value_heads + head] + a.decay_bias[head];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        scratch[head] = 1.0f / (1.0f + std::exp(-logits[head]));
        scratch[a.value_heads + head] = std::exp(a.decay_rate[head] * softplus);
    }
}

// Update some columns of a head's matrix by one token, and multiply it by the query. `width` is COLUMNS if FULL. Not
// inlined, so that all callers run the same instructions.
template <bool FULL>
__attribute__((noinline)) void update(float *matrix, int64_t stride, int64_t key_dim, const float *query,
                                      const float *key, const float *value, float factor, float decay, int64_t width,
                                      f32x16 *out) {
    const auto load_part = [&](const float *from, int part) {
        if (FULL) return load<f32x16>(from + part * LANES);
        const int64_t rest = width - part * LANES;
        return rest > 0 ? FloatRow::load_lanes(from + part * LANES, rest) : f32x16{};
    };
    const auto store_part = [&](float *to, int part, f32x16 x) {
        if (FULL) return store(to + part * LANES, x);
        const int64_t rest = width - part * LANES;
        if (rest > 0) FloatRow::store_lanes(to + part * LANES, x, rest);
    };
    f32x16 delta[VECTORS], known[SUMS][VECTORS] = {}, sums[SUMS][VECTORS] = {};
    const auto multiply_key = [&](int64_t i, int sum) {
        for (int j = 0; j < VECTORS; j++) known[sum][j] += key[i] * load_part(matrix + i * stride, j);
    };
    const auto update_row = [&](int64_t i, int sum) {
        for (int j = 0; j < VECTORS; j++) {
            const f32x16 updated = decay * load_part(matrix + i * stride, j) + key[i] * delta[j];
            store_part(matrix + i * stride, j, updated);
            sums[sum][j] += query[i] * updated;
        }
    };
    const int64_t even = key_dim / SUMS * SUMS;
    for (int64_t i = 0; i < even; i += SUMS)
        for (int sum = 0; sum < SUMS; sum++) multiply_key(i + sum, sum);
    for (int64_t i = even; i < key_dim; i++) multiply_key(i, 0);
    for (int j = 0; j < VECTORS; j++)
        delta[j] = factor * (load_part(value, j) - decay * (known[0][j] + known[1][j]));
    for (int64_t i = 0; i < even; i += SUMS)
        for (int sum = 0; sum < SUMS; sum++) update_row(i + sum, sum);
    for (int64_t i = even; i < key_dim; i++) update_row(i, 0);
    for (int j = 0; j < VECTORS; j++) out[j] = sums[0][j] + sums[1][j];
}

void copy_columns(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) std::copy_n(from + i * from_stride, width, to + i * to_stride);
}

// Run the recurrence of some columns of a head's matrix over a sequence's tokens.
template <class Row> void run_columns(const ArgosyDeltaRule &a, int64_t sequence, int64_t head, int64_t column) {
    using Scalar = typename Row::Scalar;
    const int64_t width = std::min(COLUMNS, a.value_dim - column), rows = a.key_dim;
    const int64_t channels = count_channels(a), keys = a.key_heads * a.key_dim;
    const int64_t key_head = head / (a.value_heads / a.key_heads);
    const int64_t start = a.query_start_loc[sequence], stop = a.query_start_loc[sequence + 1];
    const int64_t offset = head * a.key_dim * a.value_dim + column;
    float *own = a.states + a.rows[sequence] * a.state_stride + offset;
    if (!a.positions[start])
        for (int64_t i = 0; i < rows; i++) std::fill_n(own + i * a.value_dim, width, 0.0f);
    // The columns of a long chunk stay in the first-level cache if they are contiguous.
    alignas(64) float local[MAX_LOCAL_ROWS * COLUMNS];
    const bool is_local = stop - start > 1 && rows <= MAX_LOCAL_ROWS;
    float *matrix = is_local ? local : own;
    const int64_t stride = is_local ? COLUMNS : a.value_dim;
    if (is_local) copy_columns(local, COLUMNS, own, a.value_dim, rows, width);
    for (int64_t t = start; t < stop; t++) {
        const float *query = a.mixed + t * channels + key_head * a.key_dim, *key = query + keys;
        const float *value = a.mixed + t * channels + 2 * keys + head * a.value_dim + column;
        const float factor = a.scratch[t * 2 * a.value_heads + head];
        const float decay = a.scratch[t * 2 * a.value_heads + a.value_heads + head];
        f32x16 result[VECTORS];
        if (width == COLUMNS)
            update<true>(matrix, stride, rows, query, key, value, factor, decay, width, result);
        else
            update<false>(matrix, stride, rows, query, key, value, factor, decay, width, result);
        Scalar *out = (Scalar *)a.out + (t * a.value_heads + head) * a.value_dim + column;
        for (int j = 0; j < VECTORS && j * LANES < width; j++)
            Row::store_lanes(out + j * LANES, result[j], width - j * LANES);
        const int64_t slot = saved_slot(a, t);
        if (slot >= 0)
            copy_columns(a.states + slot * a.state_stride + offset, a.value_dim, matrix, stride, rows, width);
    }
    if (is_local) copy_columns(own, a.value_dim, local, COLUMNS, rows, width);
}

template <class Row> void run(const ArgosyDeltaRule &a) {
    const int64_t channels = count_channels(a), groups = (channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    const int64_t parts = (a.value_dim + COLUMNS - 1) / COLUMNS;
    const int64_t elements = a.tokens * a.value_heads * a.key_dim * a.value_dim;
    const int threads = limit_threads(a.threads);
#pragma omp parallel num_threads(threads) if (elements >= MIN_PARALLEL_ELEMENTS)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < a.sequences * groups; item++) {
            const int64_t first = item % groups * CONV_CHANNELS;
            convolve<Row>(a, item / groups, first, std::min(first + CONV_CHANNELS, channels));
        }
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.tokens; token++) prepare(a, token);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < a.sequences * a.value_heads * parts; item++) {
            const int64_t sequence = item / (a.value_heads * parts), head = item / parts % a.value_heads;
            run_columns<Row>(a, sequence, head, item % parts * COLUMNS);
        }
    }
}

}  // namespace

extern "C" {

void argosy_delta_rule_float32(const ArgosyDeltaRule *call) { run<FloatRow>(*call); }
void argosy_delta_rule_bfloat16(const ArgosyDeltaRule *call) { run<Bfloat16Row>(*call); }
}
