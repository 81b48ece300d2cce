// Weights of 8 and 4 bits: rounding, packing, and the expansion of 4 bits to 8.
//
// Weights are stored as unsigned bytes, value + 128. Four neighbours along K of one output make a word. Packed weight:
// [ceil(N / 32)][chunks] of a header, then [words][32 outputs]. The last chunk covers the rest of K, padded to 64.
//   8 bits: the header is a float32 scale for each output, and a word has 32 bits.
//   4 bits: after the scales, the header has a byte for each group of 32 along K and each output, with a multiplier in
//     the low half and a zero point in the high half. A line of 64 bytes holds a word of every output, outputs 0-15 in
//     the low halves of its bytes and 16-31 in the high halves. The value is (half - zero) * multiplier, -127..127, so
//     one multiplication and one addition expand a word to 8 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bytes.h"
#include "simd.h"

namespace argosy {

constexpr int64_t BLOCK_OUTPUTS = 32;  // outputs of a block
constexpr int64_t STEP_ELEMENTS = 64;  // rows of x are padded to a multiple of this along K: 16 words, one cache line
constexpr int64_t CHUNK = 256;         // elements along K that share a scale
constexpr int64_t CHUNK_WORDS = CHUNK / 4;
constexpr int64_t GROUP_WORDS = 8;  // words along K that share a multiplier
constexpr int64_t CHUNK_GROUPS = CHUNK_WORDS / GROUP_WORDS;

inline int64_t count_blocks(int64_t outs) { return (outs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS; }
inline int64_t count_steps(int64_t cols) { return (cols + STEP_ELEMENTS - 1) / STEP_ELEMENTS; }
inline int64_t count_chunks(int64_t cols) { return (cols + CHUNK - 1) / CHUNK; }
// Number of words of a chunk, including padding.
inline int64_t chunk_words(int64_t cols, int64_t chunk) {
    return std::min(CHUNK_WORDS, count_steps(cols) * (STEP_ELEMENTS / 4) - chunk * CHUNK_WORDS);
}

// Add the bias, if any, to the sums of a block's 32 outputs, and store them in a row of `out` [.., outs].
template <class E>
inline void store_outputs(const float *sums, const float *bias, void *out, int64_t outs, int64_t row, int64_t block) {
    const int64_t first = block * BLOCK_OUTPUTS, count = std::min(BLOCK_OUTPUTS, outs - first);
    f32x16 low = load<f32x16>(sums), high = load<f32x16>(sums + 16);
    if (bias) {
        low += load<f32x16>(bias + first);
        high += load<f32x16>(bias + first + 16);
    }
    auto *to = (typename E::Scalar *)out + row * outs + first;
    if (count == BLOCK_OUTPUTS) return E::write(to, low, high);
    typename E::Scalar line[BLOCK_OUTPUTS];
    E::write(line, low, high);
    std::memcpy(to, line, count * sizeof *to);
}

struct OutputPair {
    u32x16 left, right;  // one word of each of outputs 0-15 and of outputs 16-31
};

struct RoundedChunk;

struct Int8 {
    static constexpr int64_t HEADER_BYTES = BLOCK_OUTPUTS * 4, WORD_BYTES = BLOCK_OUTPUTS * 4;

    struct Group {
        Group(const uint8_t *, int64_t) {}
        static OutputPair word(const uint8_t *at) { return {load<u32x16>(at), load<u32x16>(at + 64)}; }
    };

    static void round(const float *values, RoundedChunk &to);
    static void pack_word(const uint32_t (&from)[BLOCK_OUTPUTS], uint32_t *to) {
        for (int64_t out = 0; out < BLOCK_OUTPUTS; out++) to[out] = from[out] ^ 0x80808080u;
    }
};

struct Int4 {
    static constexpr int64_t HEADER_BYTES = BLOCK_OUTPUTS * 4 + CHUNK_GROUPS * BLOCK_OUTPUTS,
                             WORD_BYTES = BLOCK_OUTPUTS * 2;

    // Multipliers of a group, twice in each lane for products of 16 bits, and the bytes to which a stored 0 expands.
    class Group {
        u32x16 left, right, left_base, right_base;
        // A product is at most 15 * 15, so no byte overflows into its neighbour.
        static u32x16 times(u32x16 a, u32x16 b) { return (u32x16)((u16x32)a * (u16x32)b); }
        static void split(const uint8_t *header, u32x16 &multiplier, u32x16 &base) {
            const u32x16 both = widen(load<u8x16>(header)), m = both & 15u;
            const u32x16 zero = times(m, both >> 4), twice = zero | zero << 8;
            multiplier = m | m << 16;
            base = 0x80808080u - (twice | twice << 16);
        }

      public:
        Group(const uint8_t *chunk, int64_t group) {
            const uint8_t *const header = chunk + BLOCK_OUTPUTS * 4 + group * BLOCK_OUTPUTS;
            split(header, left, left_base);
            split(header + 16, right, right_base);
        }
        OutputPair word(const uint8_t *at) const {
            const u32x16 both = load<u32x16>(at);
            return {times(both & 0x0f0f0f0fu, left) + left_base, times((both >> 4) & 0x0f0f0f0fu, right) + right_base};
        }
    };

    static void round(const float *values, RoundedChunk &to);
    static void pack_word(const uint32_t (&from)[BLOCK_OUTPUTS], uint32_t *to) {
        for (int64_t out = 0; out < BLOCK_OUTPUTS / 2; out++) to[out] = from[out] | from[out + BLOCK_OUTPUTS / 2] << 4;
    }
};

template <class Weight> inline int64_t block_bytes(int64_t cols) {
    return count_chunks(cols) * Weight::HEADER_BYTES + count_steps(cols) * (STEP_ELEMENTS / 4) * Weight::WORD_BYTES;
}

// Expand a packed block to 8 bits.
template <class Weight> inline void expand_block(const uint8_t *from, int64_t cols, uint8_t *to) {
    for (int64_t c = 0; c < count_chunks(cols); c++) {
        const uint8_t *const chunk = from;
        std::memcpy(to, from, Int8::HEADER_BYTES);
        from += Weight::HEADER_BYTES, to += Int8::HEADER_BYTES;
        for (int64_t w = 0; w < chunk_words(cols, c); w += GROUP_WORDS) {
            const typename Weight::Group group(chunk, w / GROUP_WORDS);
            for (int64_t i = 0; i < GROUP_WORDS; i++, from += Weight::WORD_BYTES, to += Int8::WORD_BYTES)
                store(to, group.word(from));
        }
    }
}

// Chunk of a row, rounded as in quantization.py, to bytes -127..127, or to 0..15 with `groups`.
struct RoundedChunk {
    alignas(64) uint8_t bytes[CHUNK];
    uint8_t groups[CHUNK_GROUPS];  // multiplier + 16 * zero point
    float scale;
};

constexpr float MIN_SCALE = 1e-30f;

// Round a group of 32 with the given multiplier. Returns the squared error, summed by halves, quarters and so on.
inline float round_group(const float *steps, float range_sum, float multiplier, uint8_t *bytes, uint8_t &group) {
    const float bound = std::floor(127.0f / multiplier);
    const float centre = std::nearbyint(7.5f - range_sum / multiplier / 2.0f);
    const float zero = std::min(std::max(std::min(std::max(centre, 15.0f - bound), bound), 0.0f), 15.0f);
    f32x16 error[2];
    for (int half = 0; half < 2; half++) {
        const f32x16 step = load<f32x16>(steps + half * LANES);
        const f32x16 rounded = round_nearest(step / multiplier + zero);
        const f32x16 value = rounded < 0.0f ? f32x16{} : rounded > 15.0f ? broadcast(15.0f) : rounded;
        const f32x16 difference = (value - zero) * multiplier - step;
        error[half] = difference * difference;
        store(bytes + half * LANES, __builtin_convertvector(value, u8x16));
    }
    group = (uint8_t)(multiplier + 16.0f * zero);
    return reduce_sum(error[0] + error[1]);
}

// Return the largest lane, or 0 if all are negative.
inline float max_lane(f32x16 x) {
    float part[LANES];
    store(part, maximum(x, f32x16{}));
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
    return part[0];
}

inline void Int4::round(const float *values, RoundedChunk &to) {
    constexpr int64_t SIZE = GROUP_WORDS * 4;
    float high[CHUNK_GROUPS], low[CHUNK_GROUPS], scale = 0;
    for (int64_t g = 0; g < CHUNK_GROUPS; g++) {
        const f32x16 a = load<f32x16>(values + g * SIZE), b = load<f32x16>(values + g * SIZE + LANES);
        high[g] = max_lane(maximum(a, b)), low[g] = -max_lane(maximum(-a, -b));
        scale = std::max({scale, (high[g] - low[g]) / 225.0f, high[g] / 127.0f, -low[g] / 127.0f});
    }
    const bool is_nonzero = scale >= MIN_SCALE;
    const float inverse = is_nonzero ? 1.0f / scale : 0.0f;
    to.scale = is_nonzero ? scale : 0.0f;
    for (int64_t g = 0; g < CHUNK_GROUPS; g++) {
        alignas(64) float steps[SIZE];
        for (int64_t i = 0; i < SIZE; i += LANES) store(steps + i, load<f32x16>(values + g * SIZE + i) * inverse);
        const float range_sum = (high[g] + low[g]) * inverse;
        const float coarse_multiplier =
            std::min(std::max(std::ceil((high[g] - low[g]) * inverse / 15.0f), 1.0f), 15.0f);
        uint8_t fine_bytes[SIZE], fine_group, *const bytes = to.bytes + g * SIZE;
        const float coarse_error = round_group(steps, range_sum, coarse_multiplier, bytes, to.groups[g]);
        const float fine_error =
            round_group(steps, range_sum, std::max(coarse_multiplier - 1.0f, 1.0f), fine_bytes, fine_group);
        if (fine_error < coarse_error) std::memcpy(bytes, fine_bytes, sizeof fine_bytes), to.groups[g] = fine_group;
    }
}

inline void Int8::round(const float *values, RoundedChunk &to) {
    f32x16 peaks{};
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        const f32x16 value = load<f32x16>(values + i);
        peaks = maximum(peaks, maximum(value, -value));
    }
    const float scale = max_lane(peaks) / 127.0f;
    const bool is_nonzero = scale >= MIN_SCALE;
    const float inverse = is_nonzero ? 1.0f / scale : 0.0f;
    to.scale = is_nonzero ? scale : 0.0f;
    for (int64_t i = 0; i < CHUNK; i += LANES)
        store(to.bytes + i, __builtin_convertvector(round_nearest(load<f32x16>(values + i) * inverse), i8x16));
}

// Unpacked weight.
struct DenseWeight {
    const void *weight;  // [rows, cols], contiguous
    int64_t rows, cols;
};

// Round and pack the rows of a block, with zeros after the last row. Returns whether all weights are finite.
template <class Weight, class E> inline bool pack_block(const DenseWeight &from, int64_t first, uint8_t *chunk) {
    const int64_t count = std::min(BLOCK_OUTPUTS, from.rows - first);
    bool finite = true;
    for (int64_t c = 0; c < count_chunks(from.cols); c++) {
        uint32_t rows[BLOCK_OUTPUTS][CHUNK_WORDS] = {};
        std::memset(chunk, 0, Weight::HEADER_BYTES);
        for (int64_t out = 0; out < count; out++) {
            float values[CHUNK] = {};
            RoundedChunk rounded;
            const int64_t k = c * CHUNK, available = std::min(CHUNK, from.cols - k);
            E::read((const typename E::Scalar *)from.weight + (first + out) * from.cols + k, available, values);
            i32x16 non_finite{};  // 0 while all are finite, because x - x is 0 for finite x only
            for (int64_t i = 0; i < CHUNK; i += LANES)
                non_finite |= load<f32x16>(values + i) - load<f32x16>(values + i) != 0.0f;
            for (int lane = 0; lane < LANES; lane++) finite &= non_finite[lane] == 0;
            if (!finite) return false;
            Weight::round(values, rounded);
            std::memcpy(rows[out], rounded.bytes, CHUNK);
            std::memcpy(chunk + out * 4, &rounded.scale, 4);
            for (int64_t g = 0; g < (Weight::HEADER_BYTES - BLOCK_OUTPUTS * 4) / BLOCK_OUTPUTS; g++)
                chunk[BLOCK_OUTPUTS * 4 + g * BLOCK_OUTPUTS + out] = rounded.groups[g];
        }
        chunk += Weight::HEADER_BYTES;
        for (int64_t w = 0; w < chunk_words(from.cols, c); w++, chunk += Weight::WORD_BYTES) {
            uint32_t word[BLOCK_OUTPUTS];
            for (int64_t out = 0; out < BLOCK_OUTPUTS; out++) word[out] = rows[out][w];
            Weight::pack_word(word, (uint32_t *)chunk);
        }
    }
    return true;
}

// Round and pack a weight. Returns whether all weights are finite. If not, `packed` is unusable.
template <class Weight, class E> inline bool pack(const DenseWeight &from, uint8_t *packed, int64_t threads) {
    const int64_t bytes = block_bytes<Weight>(from.cols);
    bool finite = true;
#pragma omp parallel for schedule(static) reduction(&& : finite) num_threads((int)threads)
    for (int64_t block = 0; block < count_blocks(from.rows); block++)
        finite = pack_block<Weight, E>(from, block * BLOCK_OUTPUTS, packed + block * bytes) && finite;
    return finite;
}

}  // namespace argosy
