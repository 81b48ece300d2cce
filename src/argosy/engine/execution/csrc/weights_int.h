// Weights of 8 and of 4 bits: how they are packed, and how those of 4 become those of 8.
//
// Weights stand as unsigned bytes, 128 above their value; four neighbours along K of one output make a word. Packed:
// [ceil(N / 32)][chunks] of a head, then [words][32 outputs]; the last chunk is as long as K, padded to 64, wants.
//   8 bits: the head is a float32 scale for each output, a word has 32 bits.
//   4 bits: behind the scales, the head has a byte for each group of 32 along K and output, a multiplier in its low half
//     and a zero point in its high one. A line of 64 bytes holds a word of every output: outputs 0-15 in the low halves
//     of its bytes, 16-31 in the high ones. (half - zero) * multiplier is the value, -127..127: a word is expanded to
//     8 bits by one multiplication and one addition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bytes.h"
#include "simd.h"

namespace argosy {

constexpr int64_t SIDE = 32;        // outputs of a block
constexpr int64_t STEP = 64;        // elements along K that rows of x are padded to: sixteen words, a cache line
constexpr int64_t CHUNK = 256;      // elements along K that share a scale
constexpr int64_t CHUNK_WORDS = CHUNK / 4;
constexpr int64_t GROUP_WORDS = 8;  // words along K that share a multiplier
constexpr int64_t CHUNK_GROUPS = CHUNK_WORDS / GROUP_WORDS;

inline int64_t blocks_of(int64_t outs) { return (outs + SIDE - 1) / SIDE; }
inline int64_t steps_of(int64_t cols) { return (cols + STEP - 1) / STEP; }
inline int64_t chunks_of(int64_t cols) { return (cols + CHUNK - 1) / CHUNK; }
// Words of a chunk, its padding included.
inline int64_t words_of(int64_t cols, int64_t chunk) {
    return std::min(CHUNK_WORDS, steps_of(cols) * (STEP / 4) - chunk * CHUNK_WORDS);
}

struct Pair {
    u32x16 left, right;  // a word of outputs 0-15 and of outputs 16-31
};

struct RoundedChunk;

struct Int8 {
    static constexpr int64_t HEAD_BYTES = SIDE * 4, WORD_BYTES = SIDE * 4;

    struct Group {
        Group(const uint8_t *, int64_t) {}
        static Pair word(const uint8_t *at) { return {load<u32x16>(at), load<u32x16>(at + 64)}; }
    };

    static void round(const float *values, RoundedChunk &to);
    static void pack_word(const uint32_t (&from)[SIDE], uint32_t *to) {
        for (int64_t out = 0; out < SIDE; out++) to[out] = from[out] ^ 0x80808080u;
    }
};

struct Int4 {
    static constexpr int64_t HEAD_BYTES = SIDE * 4 + CHUNK_GROUPS * SIDE, WORD_BYTES = SIDE * 2;

    // The multipliers of a group, twice in each lane for products of 16 bits, and what a half of zero becomes.
    class Group {
        u32x16 left, right, left_base, right_base;
        // No byte's product passes 15 * 15, so that none reaches into its neighbour.
        static u32x16 times(u32x16 a, u32x16 b) { return (u32x16)((u16x32)a * (u16x32)b); }
        static void split(const uint8_t *head, u32x16 &multiplier, u32x16 &base) {
            const u32x16 both = widen(load<u8x16>(head)), m = both & 15u;
            const u32x16 zero = times(m, both >> 4), twice = zero | zero << 8;
            multiplier = m | m << 16;
            base = 0x80808080u - (twice | twice << 16);
        }

      public:
        Group(const uint8_t *chunk, int64_t group) {
            const uint8_t *const head = chunk + SIDE * 4 + group * SIDE;
            split(head, left, left_base);
            split(head + 16, right, right_base);
        }
        Pair word(const uint8_t *at) const {
            const u32x16 both = load<u32x16>(at);
            return {times(both & 0x0f0f0f0fu, left) + left_base, times((both >> 4) & 0x0f0f0f0fu, right) + right_base};
        }
    };

    static void round(const float *values, RoundedChunk &to);
    static void pack_word(const uint32_t (&from)[SIDE], uint32_t *to) {
        for (int64_t out = 0; out < SIDE / 2; out++) to[out] = from[out] | from[out + SIDE / 2] << 4;
    }
};

template <class Weight> inline int64_t block_bytes(int64_t cols) {
    return chunks_of(cols) * Weight::HEAD_BYTES + steps_of(cols) * (STEP / 4) * Weight::WORD_BYTES;
}

// A block of `from` as one of 8 bits, in `to`.
template <class Weight> inline void expand_block(const uint8_t *from, int64_t cols, uint8_t *to) {
    for (int64_t c = 0; c < chunks_of(cols); c++) {
        const uint8_t *const chunk = from;
        std::memcpy(to, from, Int8::HEAD_BYTES);
        from += Weight::HEAD_BYTES, to += Int8::HEAD_BYTES;
        for (int64_t w = 0; w < words_of(cols, c); w += GROUP_WORDS) {
            const typename Weight::Group group(chunk, w / GROUP_WORDS);
            for (int64_t i = 0; i < GROUP_WORDS; i++, from += Weight::WORD_BYTES, to += Int8::WORD_BYTES)
                store(to, group.word(from));
        }
    }
}

// A chunk of a row, rounded as quantize.py does: bytes -127..127, or 0..15 with `groups`.
struct RoundedChunk {
    alignas(64) uint8_t bytes[CHUNK];
    uint8_t groups[CHUNK_GROUPS];  // multiplier + 16 * zero point
    float scale;
};

constexpr float LEAST_SCALE = 1e-30f;

// Integers of a group of 32 with this multiplier; returns the squared error, added up as halves, quarters and so on.
inline float round_group(const float *steps, float ends, float multiplier, uint8_t *bytes, uint8_t &group) {
    const float bound = std::floor(127.0f / multiplier);
    const float centre = std::nearbyint(7.5f - ends / multiplier / 2.0f);
    const float zero = std::min(std::max(std::min(std::max(centre, 15.0f - bound), bound), 0.0f), 15.0f);
    f32x16 error[2];
    for (int half = 0; half < 2; half++) {
        const f32x16 step = load<f32x16>(steps + half * LANES);
        const f32x16 whole = nearest(step / multiplier + zero);
        const f32x16 value = whole < 0.0f ? f32x16{} : whole > 15.0f ? broadcast(15.0f) : whole;
        const f32x16 off = (value - zero) * multiplier - step;
        error[half] = off * off;
        store(bytes + half * LANES, __builtin_convertvector(value, u8x16));
    }
    group = (uint8_t)(multiplier + 16.0f * zero);
    return reduce_sum(error[0] + error[1]);
}

// The largest lane, and zero at least.
inline float peak_of(f32x16 x) {
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
        high[g] = peak_of(maximum(a, b)), low[g] = -peak_of(maximum(-a, -b));
        scale = std::max({scale, (high[g] - low[g]) / 225.0f, high[g] / 127.0f, -low[g] / 127.0f});
    }
    const bool some = scale >= LEAST_SCALE;
    const float inverse = some ? 1.0f / scale : 0.0f;
    to.scale = some ? scale : 0.0f;
    for (int64_t g = 0; g < CHUNK_GROUPS; g++) {
        alignas(64) float steps[SIZE];
        for (int64_t i = 0; i < SIZE; i += LANES) store(steps + i, load<f32x16>(values + g * SIZE + i) * inverse);
        const float ends = (high[g] + low[g]) * inverse;
        const float spanning = std::min(std::max(std::ceil((high[g] - low[g]) * inverse / 15.0f), 1.0f), 15.0f);
        uint8_t finer[SIZE], group, *const bytes = to.bytes + g * SIZE;
        const float wide = round_group(steps, ends, spanning, bytes, to.groups[g]);
        const float fine = round_group(steps, ends, std::max(spanning - 1.0f, 1.0f), finer, group);
        if (fine < wide) std::memcpy(bytes, finer, sizeof finer), to.groups[g] = group;
    }
}

inline void Int8::round(const float *values, RoundedChunk &to) {
    f32x16 most{};
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        const f32x16 value = load<f32x16>(values + i);
        most = maximum(most, maximum(value, -value));
    }
    const float scale = peak_of(most) / 127.0f;
    const bool some = scale >= LEAST_SCALE;
    const float inverse = some ? 1.0f / scale : 0.0f;
    to.scale = some ? scale : 0.0f;
    for (int64_t i = 0; i < CHUNK; i += LANES)
        store(to.bytes + i, __builtin_convertvector(nearest(load<f32x16>(values + i) * inverse), i8x16));
}

// A weight as it comes.
struct Dense {
    const void *weight;  // [rows, cols], contiguous
    int64_t rows, cols;
};

// Round the rows of a block and lay them out, with zeros for those beyond; whether all are finite.
template <class Weight, class E> inline bool pack_block(const Dense &from, int64_t first, uint8_t *chunk) {
    const int64_t count = std::min(SIDE, from.rows - first);
    bool finite = true;
    for (int64_t c = 0; c < chunks_of(from.cols); c++) {
        uint32_t rows[SIDE][CHUNK_WORDS] = {};
        std::memset(chunk, 0, Weight::HEAD_BYTES);
        for (int64_t out = 0; out < count; out++) {
            float values[CHUNK] = {};
            RoundedChunk rounded;
            const int64_t k = c * CHUNK, held = std::min(CHUNK, from.cols - k);
            E::read((const typename E::Scalar *)from.weight + (first + out) * from.cols + k, held, values);
            i32x16 all{};  // 0 as long as all are finite: a number less itself is 0 only then
            for (int64_t i = 0; i < CHUNK; i += LANES) all |= load<f32x16>(values + i) - load<f32x16>(values + i) != 0.0f;
            for (int lane = 0; lane < LANES; lane++) finite &= all[lane] == 0;
            if (!finite) return false;
            Weight::round(values, rounded);
            std::memcpy(rows[out], rounded.bytes, CHUNK);
            std::memcpy(chunk + out * 4, &rounded.scale, 4);
            for (int64_t g = 0; g < (Weight::HEAD_BYTES - SIDE * 4) / SIDE; g++)
                chunk[SIDE * 4 + g * SIDE + out] = rounded.groups[g];
        }
        chunk += Weight::HEAD_BYTES;
        for (int64_t w = 0; w < words_of(from.cols, c); w++, chunk += Weight::WORD_BYTES) {
            uint32_t word[SIDE];
            for (int64_t out = 0; out < SIDE; out++) word[out] = rows[out][w];
            Weight::pack_word(word, (uint32_t *)chunk);
        }
    }
    return true;
}

// Whether all of the weight is finite; if not, `packed` is of no use.
template <class Weight, class E> inline bool pack(const Dense &from, uint8_t *packed, int64_t threads) {
    const int64_t bytes = block_bytes<Weight>(from.cols);
    bool finite = true;
#pragma omp parallel for schedule(static) reduction(&& : finite) num_threads((int)threads)
    for (int64_t block = 0; block < blocks_of(from.rows); block++)
        finite = pack_block<Weight, E>(from, block * SIDE, packed + block * bytes) && finite;
    return finite;
}

}  // namespace argosy
