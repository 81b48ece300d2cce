// Weights with a scale for each group along K, in the form in which most quantized checkpoints store them.
//
// A weight is value * scale + offset, with float32 scales and offsets for each group of 16, 32, 64, 128 or 256 along K.
// Weights of 8 bits store the value, and weights of 4 bits a code, which a table of sixteen bytes maps to the value.
// Values are bytes, stored as value + 128. Packed weight: [ceil(N / 32)][chunks] of a header, then [words][32 outputs],
// with words as in weights_int.h. The header is the scales [groups of the chunk][32], and then the offsets, if any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bytes.h"
#include "simd.h"
#include "weights_int.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace argosy {

// Sixteen bytes, looked up by the low half of each byte of a vector whose high halves are zero.
class ByteTable {
    alignas(64) uint8_t bytes[64];  // the table four times

  public:
    explicit ByteTable(const uint8_t *from) {
        for (int i = 0; i < 64; i++) bytes[i] = from[i % 16];
    }
    u32x16 look_up(u32x16 codes) const {
#if defined(__AVX512BW__)
        return (u32x16)_mm512_shuffle_epi8((__m512i)load<u32x16>(bytes), (__m512i)codes);
#elif defined(__AVX2__)
        struct Halves { __m256i half[2]; } parts;
        std::memcpy(&parts, &codes, 64);
        for (__m256i &half : parts.half) half = _mm256_shuffle_epi8(load<__m256i>(bytes), half);
        std::memcpy(&codes, &parts, 64);
        return codes;
#elif defined(__ARM_NEON) && defined(__aarch64__)
        uint8x16_t parts[4];
        std::memcpy(parts, &codes, 64);
        for (uint8x16_t &part : parts) part = vqtbl1q_u8(vld1q_u8(bytes), part);
        std::memcpy(&codes, parts, 64);
        return codes;
#else
        uint8_t parts[64];
        std::memcpy(parts, &codes, 64);
        for (uint8_t &part : parts) part = bytes[part];
        std::memcpy(&codes, parts, 64);
        return codes;
#endif
    }
};

struct Group8 {
    static constexpr int64_t WORD_BYTES = BLOCK_OUTPUTS * 4;
    static OutputPair word(const uint8_t *at, const ByteTable &) {
        return {load<u32x16>(at), load<u32x16>(at + 64)};
    }
    static void pack_word(const uint32_t (&from)[BLOCK_OUTPUTS], uint32_t *to) { Int8::pack_word(from, to); }
};

struct Group4 {
    static constexpr int64_t WORD_BYTES = BLOCK_OUTPUTS * 2;
    static OutputPair word(const uint8_t *at, const ByteTable &table) {
        const u32x16 both = load<u32x16>(at);
        return {table.look_up(both & 0x0f0f0f0fu), table.look_up((both >> 4) & 0x0f0f0f0fu)};
    }
    static void pack_word(const uint32_t (&from)[BLOCK_OUTPUTS], uint32_t *to) { Int4::pack_word(from, to); }
};

// Sizes of a packed weight [.., cols] in groups of `group`.
struct GroupLayout {
    int64_t cols, group;
    bool has_offsets;

    int64_t groups() const { return (cols + group - 1) / group; }
    int64_t chunk_groups(int64_t chunk) const { return std::min(CHUNK / group, groups() - chunk * (CHUNK / group)); }
    int64_t header_bytes(int64_t chunk) const { return chunk_groups(chunk) * BLOCK_OUTPUTS * 4 * (1 + has_offsets); }
    template <class Weight> int64_t block_bytes() const {
        return groups() * BLOCK_OUTPUTS * 4 * (1 + has_offsets) +
               count_steps(cols) * (STEP_ELEMENTS / 4) * Weight::WORD_BYTES;
    }
};

// Unpacked weight: bytes [outs, cols], which are values or codes, and scales and offsets [outs, groups] or null.
struct GroupedWeight {
    const uint8_t *bytes;
    const float *scales, *offsets;
    int64_t outs;
    GroupLayout layout;
};

// Expand a packed block to 8 bits, without changing its headers.
template <class Weight>
inline void expand_group_block(const uint8_t *from, const GroupLayout &layout, const ByteTable &table, uint8_t *to) {
    for (int64_t c = 0; c < count_chunks(layout.cols); c++) {
        const int64_t header = layout.header_bytes(c);
        std::memcpy(to, from, header);
        from += header, to += header;
        for (int64_t w = 0; w < chunk_words(layout.cols, c); w++, from += Weight::WORD_BYTES, to += Group8::WORD_BYTES)
            store(to, Weight::word(from, table));
    }
}

template <class Weight> inline void pack_group_block(const GroupedWeight &from, int64_t first, uint8_t *to) {
    const int64_t cols = from.layout.cols, groups = from.layout.groups();
    const int64_t count = std::min(BLOCK_OUTPUTS, from.outs - first);
    for (int64_t c = 0; c < count_chunks(cols); c++) {
        for (const float *numbers : {from.scales, from.offsets}) {
            for (int64_t g = 0; numbers && g < from.layout.chunk_groups(c); g++, to += BLOCK_OUTPUTS * 4) {
                float line[BLOCK_OUTPUTS] = {};
                for (int64_t out = 0; out < count; out++)
                    line[out] = numbers[(first + out) * groups + c * (CHUNK / from.layout.group) + g];
                std::memcpy(to, line, sizeof line);
            }
        }
        for (int64_t w = 0; w < chunk_words(cols, c); w++, to += Weight::WORD_BYTES) {
            uint32_t word[BLOCK_OUTPUTS] = {};
            const int64_t k = c * CHUNK + w * 4, available = std::clamp<int64_t>(cols - k, 0, 4);
            for (int64_t out = 0; out < count; out++)
                std::memcpy(word + out, from.bytes + (first + out) * cols + k, available);
            Weight::pack_word(word, (uint32_t *)to);
        }
    }
}

template <class Weight> inline void pack_groups(const GroupedWeight &from, uint8_t *packed, int64_t threads) {
    const int64_t bytes = from.layout.block_bytes<Weight>();
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t block = 0; block < count_blocks(from.outs); block++)
        pack_group_block<Weight>(from, block * BLOCK_OUTPUTS, packed + block * bytes);
}

}  // namespace argosy
