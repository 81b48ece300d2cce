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

struct Int8 {
    static constexpr int64_t HEAD_BYTES = SIDE * 4, WORD_BYTES = SIDE * 4;

    struct Group {
        Group(const uint8_t *, int64_t) {}
        static Pair word(const uint8_t *at) { return {load<u32x16>(at), load<u32x16>(at + 64)}; }
    };

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

// Rows of a weight as quantize.py makes them, contiguous.
struct Quantized {
    const int8_t *values;   // [rows, cols]: -127..127, or 0..15 with groups
    const uint8_t *groups;  // [rows, groups of 32]: multiplier + 16 * zero point; or null
    const float *scales;    // [rows, chunks]
    int64_t rows, cols;
};

// Lay out the rows of a block, with zeros for what is beyond them and beyond K.
template <class Weight> void pack_block(const Quantized &from, int64_t first, uint8_t *chunk) {
    const int64_t chunks = chunks_of(from.cols), groups = (from.cols + 31) / 32, count = std::min(SIDE, from.rows - first);
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t words = words_of(from.cols, c);
        uint32_t rows[SIDE][CHUNK_WORDS] = {};
        std::memset(chunk, 0, Weight::HEAD_BYTES);
        for (int64_t out = 0; out < count; out++) {
            const int64_t row = first + out, k = c * CHUNK, g = c * CHUNK_GROUPS;
            std::memcpy(rows[out], from.values + row * from.cols + k, std::min(CHUNK, from.cols - k));
            std::memcpy(chunk + out * 4, from.scales + row * chunks + c, 4);
            for (int64_t i = 0; from.groups && i < std::min(CHUNK_GROUPS, groups - g); i++)
                chunk[SIDE * 4 + i * SIDE + out] = from.groups[row * groups + g + i];
        }
        chunk += Weight::HEAD_BYTES;
        for (int64_t w = 0; w < words; w++, chunk += Weight::WORD_BYTES) {
            uint32_t word[SIDE];
            for (int64_t out = 0; out < SIDE; out++) word[out] = rows[out][w];
            Weight::pack_word(word, (uint32_t *)chunk);
        }
    }
}

template <class Weight> void pack(const Quantized &from, uint8_t *packed) {
    const int64_t bytes = block_bytes<Weight>(from.cols);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks_of(from.rows); block++)
        pack_block<Weight>(from, block * SIDE, packed + block * bytes);
}

}  // namespace argosy
