// Panels of keys and values that are rounded to bytes, with a float32 scale for each row (a token and KV head).
//
// A row is rounded by itself, so its bytes do not depend on when or beside what it is computed. Panels are expanded to
// elements in the first-level cache, where the compute units read them as if they were the cache. With W keys of a
// panel, N elements per word and the first `exact` elements of a key kept in bfloat16:
//   keys   bfloat16 [words of exact][W][N], int8 [words of the rest][W][N], float32 scales [W]
//   values int8 [W / N][width][N], float32 scales [W]
#pragma once

#include <algorithm>

#include "bytes.h"
#include "elements.h"
#include "scratch.h"

namespace argosy {

// Scratch memory for a row of up to `width` elements that is rounded.
struct RoundedRow {
    float *values;
    uint8_t *bytes;

    static size_t scratch_lines(int64_t width) {
        return Scratch::lines_for<float>(width + LANES) + Scratch::lines_for<uint8_t>(width + LANES);
    }
    static RoundedRow allocate(Scratch &memory, int64_t width) {
        return {memory.allocate<float>(width + LANES), memory.allocate<uint8_t>(width + LANES)};
    }
};

// Round values to bytes, see `round_to_bytes`, and return their scale.
float round_row(const float *values, int64_t count, uint8_t *bytes);

template <class Unit, class Row> class BytePanels {
    using Scalar = typename Row::Scalar;
    static constexpr int N = Unit::T::PER_WORD;
    static constexpr int W = Unit::PANEL;

    const int64_t width, exact;
    const int64_t exact_bytes = exact * W * 2, row_bytes = (width - exact) * W;  // of a panel

  public:
    const int64_t panel_words = (exact_bytes + row_bytes) / 4 + W;

    // `exact` is a multiple of 4, so that the bytes of a panel are a multiple of 32.
    BytePanels(int64_t width, int64_t exact) : width(width), exact(exact) {}

    void prefetch(const uint32_t *panel) const {
        for (int64_t word = 0; word < panel_words; word += LANES) __builtin_prefetch(panel + word);
    }

    // Store a row [width] as the key number `key` of a panel.
    void store_key(const uint32_t *row, int64_t key, RoundedRow &rounded, uint32_t *panel) const {
        const Scalar *elements = (const Scalar *)row;
        uint16_t *exact_part = (uint16_t *)panel;
        for (int64_t d = 0; d < exact; d++) {
            uint16_t bits;
            Bfloat16Row::store_lanes(&bits, Row::load_lanes(elements + d, 1), 1);
            exact_part[(d / N * W + key) * N + d % N] = bits;
        }
        round(elements + exact, width - exact, rounded, key, panel);
        uint8_t *to = (uint8_t *)panel + exact_bytes + key * N;
        for (int64_t d = 0; d < width - exact; d += N, to += W * N) std::memcpy(to, rounded.bytes + d, N);
    }

    // Store `size` elements as the value of key number `key` of a panel. The padding becomes zeros.
    void store_value(const Scalar *from, int64_t size, int64_t key, RoundedRow &rounded, uint32_t *panel) const {
        round(from, size, rounded, key, panel);
        uint8_t *to = (uint8_t *)panel + key / N * width * N + key % N;
        for (int64_t d = 0; d < width; d++) to[d * N] = d < size ? rounded.bytes[d] : 0;
    }

    // Expand a panel of keys, with zeros in place of the scaled elements of keys after the first `count`.
    void expand_keys(const uint32_t *panel, int64_t count, uint32_t *to) const {
        float scale[W], low[LANES], high[LANES];
        read_scales(panel, count, scale);
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = scale[lane / N % W];
            high[lane] = scale[(lane + LANES) / N % W];
        }
        const uint16_t *exact_part = (const uint16_t *)panel;
        if constexpr (N == 2)
            std::memcpy(to, exact_part, exact_bytes);
        else
            for (int64_t i = 0; i < exact * W; i++) to[i] = (uint32_t)exact_part[i] << 16;
        expand((const int8_t *)panel + exact_bytes, row_bytes, load<f32x16>(low), load<f32x16>(high),
               to + exact * W / N);
    }

    // Expand a panel of values, with zeros in place of those of keys after the first `count`.
    void expand_values(const uint32_t *panel, int64_t count, uint32_t *to) const {
        float scale[W], lanes[LANES];
        read_scales(panel, count, scale);
        for (int64_t word = 0; word < W / N; word++) {
            for (int lane = 0; lane < LANES; lane++) lanes[lane] = scale[word * N + lane % N];
            const f32x16 scales = load<f32x16>(lanes);
            expand((const int8_t *)panel + word * width * N, width * N, scales, scales, to + word * width);
        }
    }

  private:
    void round(const Scalar *from, int64_t size, RoundedRow &rounded, int64_t key, uint32_t *panel) const {
        for (int64_t d = 0; d < size; d += LANES)
            store(rounded.values + d, Row::load_lanes(from + d, size - d));
        const int64_t padded = (size + LANES - 1) / LANES * LANES;
        const float scale = round_row(rounded.values, padded, rounded.bytes);
        std::memcpy(panel + panel_words - W + key, &scale, 4);
    }

    void read_scales(const uint32_t *panel, int64_t count, float (&scale)[W]) const {
        std::memcpy(scale, panel + panel_words - W, sizeof scale);
        for (int64_t key = std::max<int64_t>(0, count); key < W; key++) scale[key] = 0;
    }

    // Expand bytes to elements, of which sixteen have the scales `low` and the next sixteen `high` in turns.
    static void expand(const int8_t *from, int64_t count, f32x16 low, f32x16 high, uint32_t *to) {
        for (int64_t i = 0; i < count; i += 2 * LANES) {
            const f32x16 first = to_float(load<i8x16>(from + i)) * low;
            if constexpr (N == 2) {
                store_bfloat16(to + i / 2, first, to_float(load<i8x16>(from + i + LANES)) * high);
            } else {
                store(to + i, first);
                if (i + LANES < count) store(to + i + LANES, to_float(load<i8x16>(from + i + LANES)) * high);
            }
        }
    }

    static f32x16 to_float(i8x16 x) {
#ifdef __AVX512F__
        return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#else
        return __builtin_convertvector(__builtin_convertvector(x, i32x16), f32x16);
#endif
    }
};

}  // namespace argosy
